"""A mypy plugin that removes the context from the parameters of a job.

A handler may declare `ctx: Context` without a default. The caller of `enqueue` does not pass it, and without this
plugin mypy reports it as missing. In pyproject.toml:

    [tool.mypy]
    plugins = ["longshore.mypy_plugin"]
"""

from __future__ import annotations

from collections.abc import Callable

from mypy.nodes import ARG_STAR, ARG_STAR2
from mypy.plugin import MethodContext, Plugin
from mypy.types import Instance, Parameters, Type, get_proper_type

_DECORATOR = "longshore._job.JobDecorator.__call__"
_CONTEXTS = ("longshore._context.Context", "longshore._context.SyncContext")


def _is_context(kind: Type) -> bool:
    proper = get_proper_type(kind)
    return isinstance(proper, Instance) and proper.type.fullname in _CONTEXTS


def _without_context(context: MethodContext) -> Type:
    job = get_proper_type(context.default_return_type)
    if not isinstance(job, Instance) or len(job.args) != 2:
        return context.default_return_type
    parameters = get_proper_type(job.args[0])
    if not isinstance(parameters, Parameters):
        return context.default_return_type
    kept = [
        index
        for index, kind in enumerate(parameters.arg_types)
        if parameters.arg_kinds[index] in (ARG_STAR, ARG_STAR2) or not _is_context(kind)
    ]
    changed = parameters.copy_modified(
        arg_types=[parameters.arg_types[index] for index in kept],
        arg_kinds=[parameters.arg_kinds[index] for index in kept],
        arg_names=[parameters.arg_names[index] for index in kept],
    )
    return job.copy_modified(args=[changed, job.args[1]])


class LongshorePlugin(Plugin):
    def get_method_hook(self, fullname: str) -> Callable[[MethodContext], Type] | None:
        return _without_context if fullname == _DECORATOR else None


def plugin(version: str) -> type[Plugin]:
    return LongshorePlugin
