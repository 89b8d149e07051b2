"""The product reads plainly: its functions assign one name a line."""

import ast

from tests.test_imports import MODULES, ROOT, tree_of


def is_pack(node: ast.AST) -> bool:
    """`a, b = x, y` where no value reads a target: only a swap needs both at once."""
    if not (
        isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
    ):
        return False
    targets = {ast.unparse(target) for target in node.targets[0].elts}
    return not targets & {ast.unparse(part) for part in ast.walk(node.value) if isinstance(part, ast.expr)}


def test_one_assignment_a_line():
    functions = [
        (path, node)
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    packs = {
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path, function in functions
        for node in ast.walk(function)
        if is_pack(node)
    }
    assert not packs, "\n".join(sorted(packs))
