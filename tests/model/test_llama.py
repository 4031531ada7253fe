"""The NNX definition: its names are the table's, and it is causal."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import CONFIG, UNTIED, make_model, tokens

from jprefill.model.llama import Llama, flatten
from jprefill.model.weights import weight_shapes


@pytest.mark.parametrize("config", [CONFIG, UNTIED, replace(UNTIED, has_output_bias=False)])
def test_leaves_have_the_names_and_shapes_of_the_weight_table(config):
    model = nnx.eval_shape(lambda: Llama(config, nnx.Rngs(0)))
    assert {name: leaf.shape for name, leaf in flatten(model).items()} == weight_shapes(config)


def test_a_later_token_does_not_change_an_earlier_row():
    model = make_model()
    token_ids = tokens(np.random.default_rng(0), 20)
    whole = model(jnp.asarray(token_ids))
    start = model(jnp.asarray(token_ids[:12]))
    np.testing.assert_allclose(np.asarray(whole[:12]), np.asarray(start), atol=1e-5)


def test_large_models_are_described_without_memory():
    """Llama-3.3-70B by shape alone."""
    config = replace(
        UNTIED, vocab_size=128_256, num_layers=80, embed_dim=8192, mlp_dim=28_672, num_heads=64, num_kv_heads=8,
        head_dim=128, has_attention_bias=False, has_output_bias=False, has_mlp_bias=False,
    )  # fmt: skip
    num_weights = sum(int(np.prod(shape)) for shape in weight_shapes(config).values())
    assert num_weights == 70_553_706_496
