"""A model's name -> where its files are: the bundled model, a folder, or a Hugging Face hub id. Loads none."""

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from models import bundled, config_file
from models.errors import ModelLoadError, ModelNotFoundError

logger = logging.getLogger(__name__)

_BUNDLED_NAMES = {bundled.NAME, "bundled", f"HuggingFaceTB/{bundled.NAME}"}
_HUB_ID = re.compile(r"([\w][\w.-]*/[\w][\w.-]*)(?:@([\w][\w./-]*))?")
_TOKENIZER_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
_WEIGHT_FILES = ["*.safetensors"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Exactly one of `folder`, `hub_id` and `bundled` says where the files are."""

    name: str
    folder: Path | None = None
    hub_id: str | None = None
    revision: str | None = None  # of the hub id: a branch, a tag or a commit; None: what is newest
    bundled: bool = False
    cache_dir: Path | None = None  # where the bundled model is kept; None: where kernels are by default
    image_dir: Path | None = None  # where an image keeps it, already converted

    def fetch(self, *, weights: bool = True) -> Path:
        """The local folder of the files: converted or downloaded first, where that is needed.

        Raises ModelNotFoundError or ModelLoadError.
        """
        if self.folder is not None:
            return self.folder
        if self.hub_id is not None:
            return _download(self.hub_id, self.revision, [*_TOKENIZER_FILES, *(_WEIGHT_FILES if weights else [])])
        return bundled.ensure_converted(self.cache_dir, self.image_dir)


def resolve(model: str, *, cache_dir: Path | None = None, image_dir: Path | None = None) -> ModelSource:
    """`model`: the bundled model's name, a folder, or a hub id (`owner/name`, or `owner/name@revision`). Touches no
    network.

    Raises ModelNotFoundError when it is none of these, ModelLoadError for a folder whose config.json is no model's.
    """
    if model in _BUNDLED_NAMES:
        return ModelSource(name=bundled.NAME, bundled=True, cache_dir=cache_dir, image_dir=image_dir)
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / config_file.FILE).is_file():
            raise ModelNotFoundError(f"{path} has no config.json: it is not a Hugging Face model folder")
        config_file.read(path)
        return ModelSource(name=path.resolve().name, folder=path)
    if path.is_file():
        raise ModelLoadError(f"{path} is a file: name the folder that holds config.json and the *.safetensors files")
    hub = _HUB_ID.fullmatch(model)
    if hub is not None:
        return ModelSource(name=hub[1], hub_id=hub[1], revision=hub[2])
    raise ModelNotFoundError(
        f"{model!r} is no folder, no hub id (owner/name or owner/name@revision) and not the bundled {bundled.NAME}"
    )


def _download(hub_id: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    wanted = hub_id if revision is None else f"{hub_id} at {revision}"
    try:
        folder = snapshot_download(hub_id, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"])
    except RevisionNotFoundError as error:
        raise ModelNotFoundError(f"the hub has no branch, tag or commit {revision} of {hub_id}") from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(f"the hub has no model {hub_id}, or it needs a token (HF_TOKEN)") from error
    except LocalEntryNotFoundError as error:
        raise ModelNotFoundError(f"{wanted} is not in the local hub cache, and the hub cannot be reached") from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelLoadError(f"downloading {hub_id} failed: {error}") from error
    logger.info("%s is commit %s", wanted, Path(folder).name)
    return Path(folder)
