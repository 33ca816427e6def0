"""Node lists in all forms that Slurm prints and users write."""

from __future__ import annotations

import pytest

from flexslurm.errors import SlurmError
from flexslurm.slurm.nodelist import MAX_NODES, compress, expand, expand_counts


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("login1", ["login1"]),
        ("gpu[01-03,7]", ["gpu01", "gpu02", "gpu03", "gpu7"]),
        ("a-b-3-4,n[8-11]", ["a-b-3-4", "n8", "n9", "n10", "n11"]),
        ("r[1-2]u[08-09]", ["r1u08", "r1u09", "r2u08", "r2u09"]),
        ("[1-2]", ["1", "2"]),
        ("x[1-2][3,5]", ["x13", "x15", "x23", "x25"]),
        ("n1 n2,\tn3, n1", ["n1", "n2", "n3"]),
        ("n[998-1001]", ["n998", "n999", "n1000", "n1001"]),
        ("n1.cl.example,n01.cl.example", ["n1.cl.example", "n01.cl.example"]),
        ("", []),
        ("(null)", []),
        ("None assigned", []),
        ("N/A", []),
    ],
)
def test_expand(text: str, nodes: list[str]) -> None:
    assert expand(text) == nodes


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("n[03", "unbalanced"),
        ("n3]", "unbalanced"),
        ("n[[1]]", "unbalanced"),
        ("n[1-2,]", "empty range"),
        ("n[]", "empty range"),
        ("n[3-1]", "the range '3-1'"),
        ("n[a-c]", "the range 'a-c'"),
        ("n[1-2]-ib0", "text after a closing bracket: '-ib0'"),
        ("n[1-99999999]", "more than 65536"),
        ("n[1-1000][1-1000]", "more than 65536"),
        ("n[1-99999999999999999999]", "the range"),
    ],
)
def test_broken_lists_are_refused(text: str, why: str) -> None:
    with pytest.raises(SlurmError, match="node list") as caught:
        expand(text)
    assert why in caught.value.message


def test_as_many_nodes_as_allowed() -> None:
    assert len(expand(f"n[1-{MAX_NODES}]")) == MAX_NODES


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        (["n1", "n2", "n3", "n7"], "n[1-3,7]"),
        (["gpu098", "gpu099", "gpu100", "gpu101"], "gpu[098-101]"),
        (["n9", "n010"], "n[9,010]"),
        (["a", "b1", "a1", "a2"], "a,b1,a[1-2]"),
        (["n2", "n1"], "n[2,1]"),
        ([], ""),
    ],
)
def test_compress(nodes: list[str], text: str) -> None:
    assert compress(nodes) == text
    assert expand(text) == nodes


@pytest.mark.parametrize("name", ["", "a b", "a,b", "a[1]", "(null)"])
def test_no_node_names(name: str) -> None:
    with pytest.raises(SlurmError):
        compress([name])


def test_counts() -> None:
    assert expand_counts("1(x2)") == [1, 1]
    assert expand_counts("4,2(x3)") == [4, 2, 2, 2]
    for bad in ("", "x", "1(x)", "2(3)", "1(x999999999)"):
        with pytest.raises(SlurmError):
            expand_counts(bad)
