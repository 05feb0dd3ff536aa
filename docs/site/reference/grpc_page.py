"""gRPC reference: services and messages of `proto/` with their comments, as protoc reads them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)
from grpc_tools import protoc

from docs.site.reference.markdown import anchor_of, block, code, heading, nowrap_code, table

PROTO = Path(__file__).parents[3] / "proto"
PEER = "rfork/v1/peer.proto"
SCALER = "externalscaler/externalscaler.proto"
MESSAGE, SERVICE, FIELD, METHOD, NESTED = 4, 6, 2, 2, 3
"""Field numbers of descriptor.proto that form a comment's path."""

SourcePath = tuple[int, ...]


@cache
def file_descriptor(name: str) -> FileDescriptorProto:
    """Return one file of `proto/` with its comments. Raises RuntimeError if protoc rejects it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "descriptors")
        protoc_command = [
            "protoc",
            f"-I{PROTO}",
            "--include_source_info",
            f"--descriptor_set_out={out}",
            name,
        ]
        if protoc.main(protoc_command):
            raise RuntimeError(f"protoc rejects proto/{name}")
        return FileDescriptorSet.FromString(out.read_bytes()).file[0]


def page(name: str) -> str:
    """Render services with their calls, then messages with their fields."""
    file = file_descriptor(name)
    comments = {
        tuple(location.path): (location.leading_comments, location.trailing_comments)
        for location in file.source_code_info.location
    }
    parts = []
    for index, service in enumerate(file.service):
        at = (SERVICE, index)
        parts.append(
            heading(3, f"Service {code(f'{file.package}.{service.name}')}", anchor_of("service", service.name))
        )
        parts.append(_comment(comments, at) + "\n")
        for number, method in enumerate(service.method):
            parts.append(heading(4, code(method.name), anchor_of(service.name, method.name)))
            parts.append(block(_call(method), "proto"))
            parts.append(_comment(comments, (*at, METHOD, number)) + "\n")
    for index, message in enumerate(file.message_type):
        parts += _message(message, (MESSAGE, index), comments, message.name)
    return "\n".join(parts)


def messages(name: str) -> Iterator[tuple[str, DescriptorProto]]:
    """Return all messages of a file by name, except map entries."""
    yield from _all(file_descriptor(name).message_type, "")


def _all(found: Sequence[DescriptorProto], before: str) -> Iterator[tuple[str, DescriptorProto]]:
    for message in found:
        if not message.options.map_entry:
            yield before + message.name, message
            yield from _all(message.nested_type, f"{before}{message.name}.")


def _message(
    message: DescriptorProto, at: SourcePath, comments: Mapping[SourcePath, tuple[str, str]], name: str
) -> Iterator[str]:
    if message.options.map_entry:
        return
    yield heading(3, f"Message {code(name)}", anchor_of("message", name))
    if comment := _comment(comments, at):
        yield comment + "\n"
    rows = [
        [
            str(field.number),
            nowrap_code(field.name),
            nowrap_code(_type(message, field)),
            _comment(comments, (*at, FIELD, index)),
        ]
        for index, field in enumerate(message.field)
    ]
    yield table(["number", "field", "type", "description"], rows) if rows else "No fields.\n"
    for index, nested in enumerate(message.nested_type):
        yield from _message(nested, (*at, NESTED, index), comments, f"{name}.{nested.name}")


def _comment(comments: Mapping[SourcePath, tuple[str, str]], at: SourcePath) -> str:
    """Return the comment before a definition, or the one at the end of its line."""
    leading, trailing = comments.get(at, ("", ""))
    lines = (line.removeprefix(" ") for line in (leading or trailing).splitlines())
    return "\n".join(lines).strip()


def _call(method: MethodDescriptorProto) -> str:
    words = ("stream " * method.client_streaming, "stream " * method.server_streaming)
    request_type, response_type = method.input_type.rpartition(".")[2], method.output_type.rpartition(".")[2]
    return f"rpc {method.name}({words[0]}{request_type}) returns ({words[1]}{response_type})"


def _type(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    type_name = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.type == FieldDescriptorProto.TYPE_MESSAGE:
        type_name = field.type_name.rpartition(".")[2]
        for nested in message.nested_type:
            if nested.name == type_name and nested.options.map_entry:
                key, value = nested.field
                return f"map<{_type(nested, key)}, {_type(nested, value)}>"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {type_name}"
    return f"optional {type_name}" if field.proto3_optional else type_name
