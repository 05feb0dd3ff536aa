"""vLLM plug-in: load format ``rfork``. Only `plugin.register` is called from outside; see `loader`."""
