"""SGLang's plug-in: `--rfork-*` flags, load format ``rfork``, ranks, and where its weights change.

Nothing of SGLang is imported before SGLang itself asks for the plug-in (`plugin.register`).
"""
