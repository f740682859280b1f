"""Bundle of a run: a zip archive that is an RO-Crate, and its comparison with what is found here.

The metadata follow RO-Crate 1.1 (https://w3id.org/ro/crate/1.1) and its profile for runs of a program, the
Process Run Crate 0.5 (https://w3id.org/ro/wfrun/process/0.5).
"""

from __future__ import annotations

import hashlib
import json
import platform
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import IO, Any

from hetctl import __version__
from hetctl.app.project import Project
from hetctl.app.run.export import replacing
from hetctl.app.run.select_run import known_run
from hetctl.app.run.status import run_status
from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BadInputError
from hetctl.model.exports import BundleCheck, Bundled, BundleDifference, DataFile, Origin
from hetctl.model.run_status import RunStatus
from hetctl.model.serialization import decode, encode
from hetctl.storage.kept_modules import revision_of, with_kept_modules
from hetctl.storage.paths import RunFolder
from hetctl.storage.purge import files_below
from hetctl.storage.run_files import read_spec

METADATA, ORIGIN, SPEC, RESULTS, CURVES = (
    "ro-crate-metadata.json",
    "origin.json",
    "run.json",
    "results.json",
    "epochs.jsonl",
)
CODE, CHECKPOINTS = "code/", "checkpoints/"
CRATE = "https://w3id.org/ro/crate/1.1"
PROFILE = "https://w3id.org/ro/wfrun/process/0.5"
CONTEXT = [f"{CRATE}/context", "https://w3id.org/ro/terms/workflow-run/context"]
MOST_DIGESTED = 16 * 2**30
"""Bytes of data beyond which sizes alone are kept: digests would take minutes."""
ENDING = ".crate.zip"
STATUS_OF = {"finished": "CompletedActionStatus", "failed": "FailedActionStatus"}
"""Terms of schema.org for states of a run; all others are of one that goes on."""


def bundle(
    project: Project, run: str | None, output: Path | None, *, checkpoints: bool, force: bool
) -> Bundled:
    """Write a run, by default the newest, into a zip archive.

    Parameters
    ----------
    output : Path or None
        File to write; None: one with the name of the run, in the project's folder.
    checkpoints : bool
        True to include the checkpoint of each member's best epoch.

    Raises
    ------
    BadInputError
        If there is no such run, or the file exists or cannot be written.
    """
    record, _ = known_run(project, run)
    status, folder = run_status(project, record.spec.run), project.home.run(record.spec.run)
    output = output or project.folder / f"{status.run}{ENDING}"
    if output.exists() and not force:
        raise BadInputError(f"{output} exists already", "name another file, or replace it with --force")
    try:
        with replacing(output) as new, zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as archive:
            _write(archive, status, folder, checkpoints)
            names = tuple(archive.namelist())
    except OSError as error:
        raise BadInputError(f"cannot write {output}: {error.strerror}") from None
    return Bundled(status.run, str(output.resolve()), names, output.stat().st_size)


def _write(archive: zipfile.ZipFile, status: RunStatus, folder: RunFolder, checkpoints: bool) -> None:
    spec = read_spec(folder)
    kept = Path(with_kept_modules(spec, folder).ensemble.folder)
    origin = Origin(spec.revision, data_of(spec.ensemble), _versions())
    archive.writestr(SPEC, _json(encode(spec)))
    archive.writestr(ORIGIN, _json(encode(origin)))
    archive.writestr(RESULTS, _json(_results(status)))
    archive.writestr(CURVES, "".join(_curves(status)))
    for path in sorted(spec.modules):
        archive.write(kept / path, f"{CODE}{path}")
    for member in status.members if checkpoints else ():
        for file in _files_in(Path(member.best_checkpoint)) if member.best_checkpoint else ():
            inside = file.relative_to(Path(member.best_checkpoint).parent)
            archive.write(file, f"{CHECKPOINTS}{member.member}/{inside}")
    archive.writestr(METADATA, _json(_crate(archive, status, origin)))


def _results(status: RunStatus) -> dict[str, Any]:
    keys = ("member", "state", "epochs", "metric", "mode", "best", "best_epoch", "reason", "config")
    return {
        **{
            key: encode(getattr(status, key))
            for key in ("run", "ensemble", "site", "planner", "state", "cost")
        },
        "members": [{key: encode(getattr(member, key)) for key in keys} for member in status.members],
    }


def _curves(status: RunStatus) -> Iterator[str]:
    for name, epochs in status.history.items():
        for done in epochs:
            yield json.dumps({"member": name, **encode(done)}) + "\n"


def data_of(ensemble: Ensemble) -> dict[str, DataFile]:
    """Return the files that an ensemble names as data; data that are no path have none."""
    folder = Path(ensemble.folder)
    named = {code.data for code in ensemble.codes if code.data}
    if ensemble.partitions:
        named |= {*ensemble.partitions.paths(), *ensemble.partitions.sources()}
    found = {file for name in named for file in _files_in(folder / name)}
    sizes = {file: file.stat().st_size for file in found}
    is_small = sum(sizes.values()) <= MOST_DIGESTED
    return {
        _named(file, folder): DataFile(sizes[file], _digest(file.open("rb")) if is_small else None)
        for file in sorted(found)
    }


def _named(file: Path, folder: Path) -> str:
    return file.relative_to(folder).as_posix() if file.is_relative_to(folder) else str(file)


def _files_in(path: Path) -> Iterator[Path]:
    """Yield a file, or the files of a folder; nothing if there is neither."""
    yield from filter(Path.is_file, (path, *files_below(path)))


def _digest(data: IO[bytes]) -> str:
    """Return the SHA-256 of an open file, and close it."""
    with data:
        return hashlib.file_digest(data, "sha256").hexdigest()  # type: ignore[arg-type]


def _versions() -> dict[str, str]:
    found = {each.metadata["Name"]: each.version for each in distributions()}
    return {
        "python": platform.python_version(),
        **dict(sorted(found.items(), key=lambda each: each[0].lower())),
    }


def _json(value: Any) -> str:
    return json.dumps(value, indent=2)


def _crate(archive: zipfile.ZipFile, status: RunStatus, origin: Origin) -> dict[str, Any]:
    """Return the metadata of an archive with all its other files."""
    files = [_file(archive, name) for name in archive.namelist()]
    inputs = [each for each in files if each["@id"] in (SPEC, ORIGIN) or each["@id"].startswith(CODE)]
    outputs = [each for each in files if each not in inputs]
    data = [
        {
            **{"@id": f"#data/{path}", "@type": "CreativeWork", "name": path, "contentSize": str(file.bytes)},
            **({"sha256": file.sha256} if file.sha256 else {}),
        }
        for path, file in origin.data.items()
    ]
    action = {
        "@id": "#run",
        "@type": "CreateAction",
        "name": f"run {status.run} of ensemble {status.ensemble}",
        "instrument": {"@id": "#hetctl"},
        "object": _links([*inputs, *data]),
        "result": _links(outputs),
        "startTime": _time(status.submitted_at),
        "endTime": _time(status.submitted_at + status.measured_s),
        "actionStatus": f"http://schema.org/{STATUS_OF.get(status.state, 'ActiveActionStatus')}",
    }
    root = {
        "@id": "./",
        "@type": "Dataset",
        "name": f"hetctl run {status.run}",
        "description": f"Configuration, code, digests and results of {len(status.members)} networks.",
        "datePublished": _time(datetime.now(UTC).timestamp()),
        "conformsTo": {"@id": PROFILE},
        "hasPart": _links(files),
        "mentions": {"@id": "#run"},
    }
    about = {
        "@id": METADATA,
        "@type": "CreativeWork",
        "conformsTo": {"@id": CRATE},
        "about": {"@id": "./"},
    }
    profile = {"@id": PROFILE, "@type": "CreativeWork", "name": "Process Run Crate", "version": "0.5"}
    program = {
        "@id": "#hetctl",
        "@type": "SoftwareApplication",
        "name": "hetctl",
        "softwareVersion": __version__,
    }
    return {"@context": CONTEXT, "@graph": [about, root, profile, program, action, *files, *data]}


def _file(archive: zipfile.ZipFile, name: str) -> dict[str, Any]:
    return {
        "@id": name,
        "@type": "File",
        "name": name.rpartition("/")[2],
        "contentSize": str(archive.getinfo(name).file_size),
        "sha256": _digest(archive.open(name)),
    }


def _links(entities: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [{"@id": each["@id"]} for each in entities]


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def check_bundle(project: Project, path: Path) -> BundleCheck:
    """Compare a bundle with its own digests, and with code, data and packages of this project.

    Raises
    ------
    BadInputError
        If the file is no bundle.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            crate = json.loads(archive.read(METADATA))
            files = [each for each in crate["@graph"] if each["@type"] == "File"]
            own = {each["@id"]: (each["sha256"], _digest(archive.open(each["@id"]))) for each in files}
            origin = decode(Origin, json.loads(archive.read(ORIGIN)))
            spec = json.loads(archive.read(SPEC))
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, zipfile.BadZipFile) as error:
        raise BadInputError(f"{path} is no bundle of a run: {error}", "`hetctl bundle` writes one") from None
    code = {name.removeprefix(CODE): kept for name, (kept, _) in own.items() if name.startswith(CODE)}
    versions = _versions()
    pairs: list[tuple[str, str | None, str | None]] = [
        *((f"{name} in the bundle", *digests) for name, digests in own.items()),
        *((f"module {name}", kept, _found(project.folder / name, True)) for name, kept in code.items()),
        *(
            (
                f"data {name}",
                one.sha256 or _size(one.bytes),
                _found(project.folder / name, bool(one.sha256)),
            )
            for name, one in origin.data.items()
        ),
        *((f"package {name}", kept, versions.get(name)) for name, kept in origin.versions.items()),
        *([("revision", origin.revision, revision_of(project.folder))] if origin.revision else []),
    ]
    differences = tuple(BundleDifference(*pair) for pair in pairs if pair[1] != pair[2])
    return BundleCheck(spec["run"], len(pairs), differences)


def _found(file: Path, digested: bool) -> str | None:
    """Return the digest of a file here, or its size; None if there is none."""
    if not file.is_file():
        return None
    return _digest(file.open("rb")) if digested else _size(file.stat().st_size)


def _size(count: int) -> str:
    return f"{count} bytes"
