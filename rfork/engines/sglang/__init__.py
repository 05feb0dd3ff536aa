"""SGLang plug-in: `--rfork-*` flags, load format ``rfork``, rank identities, and hooks around weight changes.

Nothing of SGLang is imported before SGLang calls the plug-in (`plugin.register`).
"""
