"""Generates `src/longshore/_wire.py` from the OpenAPI document of the server.

python tools/generate_wire.py            # writes the file
python tools/generate_wire.py --check    # prints a diff and exits 1 if the file is out of date
"""

from __future__ import annotations

import argparse
import difflib
import json
import keyword
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
OPENAPI = HERE.parent.parent / "docs" / "openapi.json"
TARGET = HERE / "src" / "longshore" / "_wire.py"

HEADER = '''"""The types of requests and responses. Generated from docs/openapi.json by tools/generate_wire.py."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Union
'''


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--openapi", type=Path, default=OPENAPI, help="the OpenAPI document")
    arguments = parser.parse_args()
    generated = generate(json.loads(arguments.openapi.read_text()))
    if not arguments.check:
        TARGET.write_text(generated)
        return 0
    current = TARGET.read_text() if TARGET.exists() else ""
    if current == generated:
        return 0
    lines = difflib.unified_diff(
        current.splitlines(keepends=True), generated.splitlines(keepends=True), "_wire.py", "generated"
    )
    sys.stdout.writelines(lines)
    print("\n_wire.py is out of date; run `python tools/generate_wire.py`", file=sys.stderr)
    return 1


def generate(document: dict[str, Any]) -> str:
    schemas = document["components"]["schemas"]
    parts = [HEADER]
    aliases = []
    for name in sorted(schemas):
        schema = schemas[name]
        if "properties" in schema:
            parts.append(typed_dict(name, schema))
        else:
            aliases.append(name)
    # Aliases are evaluated at import, so they come after the classes and after the aliases they use.
    done: set[str] = set()
    while aliases:
        ready = [name for name in aliases if not (references(schemas[name]) & set(aliases))]
        if not ready:
            raise SystemExit(f"these schemas refer to each other: {aliases}")
        for name in ready:
            parts.append(f"{name} = {annotation(schemas[name])}\n")
            done.add(name)
        aliases = [name for name in aliases if name not in done]
    return "\n".join(parts)


def typed_dict(name: str, schema: dict[str, Any]) -> str:
    required = set(schema.get("required", []))
    fields = {field: annotation(value) for field, value in schema["properties"].items()}
    bad = [field for field in fields if keyword.iskeyword(field)]
    if bad:
        raise SystemExit(f"{name}: {bad} are Python keywords")
    needed = [f"    {field}: {kind}" for field, kind in fields.items() if field in required]
    optional = [f"    {field}: {kind}" for field, kind in fields.items() if field not in required]
    description = first_sentence(schema.get("description", ""))
    doc = f'    """{description}"""\n\n' if description else ""
    if not optional:
        return f"\nclass {name}(TypedDict):\n{doc}" + "\n".join(needed) + "\n"
    if not needed:
        return f"\nclass {name}(TypedDict, total=False):\n{doc}" + "\n".join(optional) + "\n"
    # `NotRequired` needs Python 3.11.
    base = f"\nclass _{name}Required(TypedDict):\n" + "\n".join(needed) + "\n"
    return base + f"\n\nclass {name}(_{name}Required, total=False):\n{doc}" + "\n".join(optional) + "\n"


def first_sentence(text: str) -> str:
    line = " ".join(text.split())
    sentence = line.split(". ")[0].rstrip(".")
    return sentence + "." if sentence else ""


def annotation(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].rsplit("/", 1)[1])
    for word in ("oneOf", "anyOf"):
        if word in schema:
            return union([annotation(member) for member in schema[word]])
    if "allOf" in schema:
        return annotation(schema["allOf"][0]) if len(schema["allOf"]) == 1 else "dict[str, Any]"
    if "enum" in schema:
        return "Literal[" + ", ".join(json.dumps(value) for value in schema["enum"]) + "]"
    kind = schema.get("type")
    if isinstance(kind, list):
        return union([annotation({**schema, "type": member}) for member in kind])
    if kind == "array":
        return f"list[{annotation(schema.get('items', {}))}]"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"dict[str, {annotation(schema['additionalProperties'])}]"
    names = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
    return names.get(str(kind), "dict[str, Any]" if kind == "object" else "Any")


def union(members: list[str]) -> str:
    members = list(dict.fromkeys(members))
    members.sort(key=lambda member: member == "None")
    if "Any" in members:
        return "Any"
    return members[0] if len(members) == 1 else f"Union[{', '.join(members)}]"


def references(schema: Any) -> set[str]:
    if isinstance(schema, dict):
        found = {schema["$ref"].rsplit("/", 1)[1]} if isinstance(schema.get("$ref"), str) else set()
        return found.union(*(references(value) for value in schema.values()))
    if isinstance(schema, list):
        return set().union(*(references(value) for value in schema))
    return set()


if __name__ == "__main__":
    sys.exit(main())
