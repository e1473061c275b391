"""Each module names all that the package takes of one library beneath its public names.

No other part names what begins with an underscore in torch or transformers, or a module of
transformers that it does not export, so that a new version is met here alone.
"""
