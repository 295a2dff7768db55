"""A model's name -> where its files are: the bundled model, a folder, or a Hugging Face hub id. Loads none."""

import re
from dataclasses import dataclass
from pathlib import Path

from models import bundled
from models.errors import ModelLoadError, ModelNotFoundError

_BUNDLED_NAMES = {bundled.NAME, "bundled", f"HuggingFaceTB/{bundled.NAME}"}
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_TOKENIZER_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
_WEIGHT_FILES = ["*.safetensors"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Exactly one of `folder`, `hub_id` and `bundled` says where the files are."""

    name: str
    folder: Path | None = None
    hub_id: str | None = None
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
            return _download(self.hub_id, [*_TOKENIZER_FILES, *(_WEIGHT_FILES if weights else [])])
        return bundled.ensure_converted(self.cache_dir, self.image_dir)


def resolve(model: str, *, cache_dir: Path | None = None, image_dir: Path | None = None) -> ModelSource:
    """`model`: the bundled model's name, a folder, or a hub id (`owner/name`). Touches no network.

    Raises ModelNotFoundError when it is none of these.
    """
    if model in _BUNDLED_NAMES:
        return ModelSource(name=bundled.NAME, bundled=True, cache_dir=cache_dir, image_dir=image_dir)
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(f"{path} has no config.json: it is not a Hugging Face model folder")
        return ModelSource(name=path.resolve().name, folder=path)
    if path.is_file():
        raise ModelLoadError(f"{path} is a file: name the folder that holds config.json and the *.safetensors files")
    if _HUB_ID.fullmatch(model):
        return ModelSource(name=model, hub_id=model)
    raise ModelNotFoundError(f"{model!r} is no folder, no hub id (owner/name) and not the bundled {bundled.NAME}")


def _download(hub_id: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(f"the hub has no model {hub_id}, or it needs a token (HF_TOKEN)") from error
    except LocalEntryNotFoundError as error:
        raise ModelNotFoundError(f"{hub_id} is not in the local hub cache, and the hub cannot be reached") from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelLoadError(f"downloading {hub_id} failed: {error}") from error
