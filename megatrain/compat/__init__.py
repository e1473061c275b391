"""What the package takes of its libraries beneath their public names: a module for each library.

No other part names what begins with an underscore in torch or transformers, or a module of
transformers that it does not export, so that a new version is met here alone.
"""
