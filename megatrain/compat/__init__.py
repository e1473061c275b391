"""The only modules that use private parts of libraries: one module for each library.

No other package uses names of torch or transformers that begin with an underscore, or modules that
transformers does not export. So a new version of a library needs changes here alone.
"""
