"""Operators of PyTorch are pickled by name."""

from __future__ import annotations

import pytest

from prefect_gpu.frameworks.torch_adapter import reduce_compiled


def test_an_operator_of_a_namespace_with_a_dot_is_found_again() -> None:
    torch = pytest.importorskip("torch")
    library = torch.library.Library("my.package", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    namespace = getattr(torch.ops, "my.package")
    for each in (torch.ops, namespace, namespace.twice, namespace.twice.default):
        make, arguments = reduce_compiled(each)
        assert make(*arguments) is each
