"""Objects of the Kubernetes API as decoded JSON, of which any part may be missing or null."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Document: TypeAlias = Mapping[str, Any]


def get_dict(document: Document | None, name: str) -> Document:
    """Return the JSON object at *name*; an empty one if it is missing or null."""
    found: Any = document.get(name) if document is not None else None
    return found or {}


def get_list(document: Document | None, name: str) -> Sequence[Any]:
    """Return the list at *name*; an empty one if it is missing or null."""
    found: Any = document.get(name) if document is not None else None
    return found or ()


def labels_of(document: Document | None) -> Document:
    """Return the object's labels."""
    return get_dict(get_dict(document, "metadata"), "labels")


def annotations_of(document: Document | None) -> Document:
    """Return the object's annotations."""
    return get_dict(get_dict(document, "metadata"), "annotations")


def condition(document: Document | None, kind: str, status: str | None = "True") -> Document | None:
    """Return the object's condition of this *kind* and *status* (None: any status), or None."""
    found: Document
    for found in get_list(get_dict(document, "status"), "conditions"):
        if found.get("type") == kind and status in (None, found.get("status")):
            return found
    return None


def age_key(document: Document) -> tuple[str, str]:
    """Return a key that sorts objects from old to new; the API lists them by name."""
    metadata = get_dict(document, "metadata")
    return str(metadata.get("creationTimestamp") or ""), str(metadata.get("name") or "")


def uid(document: Document | None) -> str:
    """Return the object's uid, or its name if it has no uid yet."""
    metadata = get_dict(document, "metadata")
    return str(metadata.get("uid") or metadata.get("name") or "")
