"""What commands that talk to a server take from the environment. Knows no server's settings."""

from pydantic_settings import BaseSettings, SettingsConfigDict

from server.setting_types import Secrets


class ClientSettings(BaseSettings):
    """What `longwave chat` takes from the environment: the key a server on this machine would ask for."""

    model_config = SettingsConfigDict(env_prefix="LONGWAVE_", extra="ignore", frozen=True, hide_input_in_errors=True)

    api_key: Secrets = ()

    @property
    def key(self) -> str | None:
        return self.api_key[0].get_secret_value() if self.api_key else None
