"""Device operations, one folder each: a thin API, a plain reference, one file per implementation."""
