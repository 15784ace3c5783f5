"""The version of this package. Parts of the package on other machines compare it with their own."""

VERSION = "0.1.0"
