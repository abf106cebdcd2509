"""A copy of the working tree as a user would have it, and the environment of its commands: the build
just made and the installed Python packages come along by links, nothing else does."""

import os
import pathlib
import shutil
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]


def source_files():
    """What git knows or would add; of an unpacked archive everything but what is made here."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, check=False)
    if listed.returncode == 0:
        names = [pathlib.Path(os.fsdecode(name)) for name in listed.stdout.split(b"\0") if name]
    else:
        made = {"build", ".venv", "outputs", ".cache"}
        names = [path.relative_to(ROOT) for path in ROOT.rglob("*")
                 if path.is_file() and path.relative_to(ROOT).parts[0] not in made]
    return [name for name in names if (ROOT / name).is_file() and name != pathlib.Path(".venv")]


def overlay(folder):
    """Puts the tree's files, changed ones too, into the folder."""
    for name in source_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)


def make(folder, build):
    """The copy, with build/release and .venv standing for a set-up that is done."""
    folder.mkdir(parents=True)
    overlay(folder)
    (folder / "build").mkdir()
    (folder / "build" / "release").symlink_to(build)
    (folder / ".venv").symlink_to(ROOT / ".venv")


def environment(folder, build=None):
    """Nothing of this process's own settings reaches the commands, and no home folder but their own."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(("TESSERA_", "OMPI_", "SLURM_", "PMI_"))
            and name not in ("CCACHE_BASEDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "MASTER_ADDR", "MASTER_PORT")}
    home = folder / ".home"
    home.mkdir(exist_ok=True)
    paths = [str(part) for part in (build, folder / ".venv" / "bin") if part] + [os.environ["PATH"]]
    # ccache's folder follows HOME; without it a compilation would begin with nothing.
    ccache = os.environ.get("CCACHE_DIR") or next(
        (str(place) for place in (pathlib.Path.home() / ".ccache", pathlib.Path.home() / ".cache/ccache")
         if place.is_dir()), None)
    return {**kept, "HOME": str(home), "PATH": ":".join(paths), "HF_HUB_OFFLINE": "1",
            **({"CCACHE_DIR": ccache} if ccache else {}),
            # mpirun refuses to start as root, and more ranks than cores, unless told.
            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_rmaps_base_oversubscribe": "1"}
