"""Lists the benchmarks: `python -m bench`."""

import ast
from pathlib import Path


def commands() -> dict[str, str]:
    """{NAME of `python -m bench.NAME`: first line of its docstring}."""
    lines = {}
    for file in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        module = ast.parse(file.read_text())
        if any(isinstance(part, ast.FunctionDef) and part.name == "main" for part in module.body):
            lines[file.stem] = (ast.get_docstring(module) or "").partition("\n")[0]
    return lines


def main() -> None:
    for name, line in commands().items():
        print(f"{name:<22}{line.partition(': `python -m')[0]}")


if __name__ == "__main__":
    main()
