"""The version of this package, for the parts of it that run on other machines too."""

VERSION = "0.1.0"
