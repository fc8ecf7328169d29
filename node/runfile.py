"""run.toml: read, and compared with the run that an invite names."""

from pathlib import Path

from stretto.protocol.config import RunConfig
from stretto.protocol.errors import ConfigError


def check_expected(run: RunConfig, expect: Path | None) -> None:
    """ConfigError that names each differing key if the run is not the one in the file ``expect``."""
    if expect is None:
        return
    different = run.differences(read_run(expect))
    if different:
        raise ConfigError(
            f"the run that the invite names is not the one in {expect}; run != file in {'; '.join(different)}. "
            "Settings of a run are its operator's: ask for an invite to another run, or join without --expect"
        )


def read_run(file: Path) -> RunConfig:
    """The run config in ``file``. ConfigError names the file."""
    try:
        return RunConfig.from_toml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}. `stretto new {file}` writes one") from None
    except (ConfigError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from None
