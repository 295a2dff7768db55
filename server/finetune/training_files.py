"""The files that a request names: checked against what its method learns from, and linked into a folder for the job,
beside what chats are rendered with. Blocking; must not know SQL, HTTP or training."""

import logging

from server.errors import InsufficientStorage, InvalidFile, InvalidRequest
from server.files.catalog import StoredFile
from server.files.examples import Form
from server.files.store import FileStore
from server.finetune.folders import TRAINING, VALIDATION, Folders, JobFolder
from server.finetune.records import JobRequest
from server.text.operators_template import OperatorsTemplate

logger = logging.getLogger("longwave")

FORMS = {"supervised": (Form.CHAT, Form.COMPLETION), "dpo": (Form.PREFERENCE,)}


def make_folder(
    folders: Folders, files: FileStore, template: OperatorsTemplate, job_id: str, owner: str, request: JobRequest
) -> None:
    """Raises InvalidFile, InsufficientStorage, and has then left nothing."""
    wanted = {TRAINING: request.training_file}
    if request.validation_file is not None:
        wanted[VALIDATION] = request.validation_file
    found = [_checked(files, name, file_id, owner, request) for name, file_id in wanted.items()]
    if len({stored.form for stored in found}) > 1:
        raise InvalidFile("training_file and validation_file have different forms.", param=VALIDATION)

    def link(folder: JobFolder) -> None:
        for name, file_id in wanted.items():
            try:
                files.link(file_id, owner, folder.dataset(name))
            except InvalidRequest as error:  # deleted since
                raise _invalid(name, error) from None
        folder.keep_template(template)

    try:
        folders.create(job_id, link)
    except OSError as error:
        logger.error("fine-tuning jobs in %s: %s", folders.root, error)
        raise InsufficientStorage(
            "The server cannot keep fine-tuning jobs: its disk is full, or its data directory cannot be used."
        ) from error


def _checked(files: FileStore, name: str, file_id: str, owner: str, request: JobRequest) -> StoredFile:
    try:
        stored = files.get(file_id, owner)
    except InvalidRequest as error:
        raise _invalid(name, error) from None
    if stored.form is None:
        raise InvalidFile(
            f"Invalid {name}: the purpose of {file_id} is '{stored.purpose}', not 'fine-tune'.", param=name
        )
    wanted = FORMS[request.method]
    if stored.form not in wanted:
        raise InvalidFile(
            f"Invalid {name}: {file_id} holds {stored.form} examples; method '{request.method}' learns from "
            f"{' or '.join(wanted)} examples.",
            param=name,
        )
    return stored


def _invalid(name: str, error: InvalidRequest) -> InvalidFile:
    return InvalidFile(f"Invalid {name}: {error.message}", param=name)
