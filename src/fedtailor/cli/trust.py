"""``key``, ``sign`` and ``verify``: whether a run directory is as it was when it was finished, and by whom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedtailor.cli.base import Json, print_text

Where = Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a finished run or comparison.")]


def key(
    path: Annotated[Path, typer.Argument(metavar="KEY.pem", help="The file of the private key.")], as_json: Json = False
) -> None:
    """Make a pair of keys: KEY.pem, to sign with, which only you can read, and KEY.pub.pem, to give away."""
    from fedtailor.runs.signature import make_keys

    public = make_keys(path)
    if as_json:
        typer.echo(json.dumps({"private": str(path), "public": str(public)}, indent=2))
    else:
        print_text(f"Sign with {path}, which nobody else should have; others verify with {public}.")


def sign(
    where: Where, key: Annotated[Path, typer.Option(help="Your private key, made by fedtailor key.")], as_json: Json = False
) -> None:
    """Sign a finished run or comparison, after checking that its files are as they were written."""
    from fedtailor.runs import signature
    from fedtailor.runs.contents import open_contents, verify_all

    count = verify_all(open_contents(where))
    signature.sign(where, key)
    if as_json:
        typer.echo(json.dumps({"run": str(where), "files": count, "signed": True}, indent=2))
    else:
        print_text(f"Signed {where}, {count} files.")


def verify(
    where: Where,
    key: Annotated[Path | None, typer.Option(help="The public key of whoever signed it.")] = None,
    as_json: Json = False,
) -> None:
    """Check every file of a finished run or comparison against its manifest, and the signature, if a key is given."""
    from fedtailor.runs import signature
    from fedtailor.runs.contents import open_contents, verify_all

    count = verify_all(open_contents(where))
    signed = signature.is_signed(where)
    if key is not None:
        signature.check(where, key)
    if as_json:
        typer.echo(json.dumps({"run": str(where), "files": count, "signed": signed, "checked": key is not None}, indent=2))
        return
    by = f"signed by the owner of {key}" if key else "signed, by whom was not checked (--key)" if signed else "not signed"
    print_text(f"All {count} files of {where} are as they were written; {by}.")
