"""Random sequences of operations against a model that is a few dicts: all ranks are threads of one process."""
