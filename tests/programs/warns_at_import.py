import warnings

warnings.warn("a module's import warns", UserWarning, stacklevel=1)
VALUE = 5
