"""Who holds which prefix, and where: keys, index, device pool, host and disk tiers."""
