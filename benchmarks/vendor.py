"""Puts the libraries that asv's pages load from elsewhere beside them, so that the site works by itself.

asv 0.6 loads ten files from content networks. They are taken from packages of the npm registry by `npm pack`, kept
under .asv/vendor, and must have the hash below. Those of Flot are the sources of what asv loads minified, and
stupidtable is 1.1.3 where asv loads 1.0.1.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

KEPT = Path(__file__).parent.parent / ".asv" / "vendor"


@dataclass(frozen=True)
class Library:
    """A file that asv's page names.

    Attributes:
        named: how the address in asv's page ends.
        package: the npm package and its version.
        member: the file in it.
        sha256: of the file.
    """

    named: str
    package: str
    member: str
    sha256: str

    @property
    def file(self) -> str:
        """The name of the file beside the page."""
        return Path(self.member).name


LIBRARIES = (
    Library(
        "jquery-3.3.1.min.js",
        "jquery@3.3.1",
        "dist/jquery.min.js",
        "160a426ff2894252cd7cebbdd6d6b7da8fcd319c65b70468f10b6690c45d02ef",
    ),
    Library(
        "jquery.flot.min.js",
        "flot@0.8.3",
        "jquery.flot.js",
        "b7b931f273c38b1277b9c6c1f4e05c4ec09885a487bddaf3279e2d7e49a38e12",
    ),
    Library(
        "jquery.flot.time.min.js",
        "flot@0.8.3",
        "jquery.flot.time.js",
        "a582c832adc7138a6b05aaf61f16ebac274701f1be4afea77e739a1c34b9c41a",
    ),
    Library(
        "jquery.flot.selection.min.js",
        "flot@0.8.3",
        "jquery.flot.selection.js",
        "e6c85f6c1ebe4b4da29d8ae238c7c5060283f05f7ef054f6b91817d02c092918",
    ),
    Library(
        "jquery.flot.categories.min.js",
        "flot@0.8.3",
        "jquery.flot.categories.js",
        "6e81664b28ea795c734906f4aa15614640a75ac7fbd399a7fb9084040698351a",
    ),
    Library(
        "jquery.flot.orderBars.js",
        "flot-orderbars@1.0.0",
        "js/jquery.flot.orderBars.js",
        "39735b4f46f96ff4e082572401f47c55a2767b366fd1d1e821e44a8d830a12bf",
    ),
    Library(
        "stupidtable.min.js",
        "stupid-table-plugin@1.1.3",
        "stupidtable.min.js",
        "4642380f28ebe9ed7cac251793b281ef8620c4386205d92788f9b12f5cceb4e0",
    ),
    Library(
        "md5.min.js",
        "blueimp-md5@2.19.0",
        "js/md5.min.js",
        "64d7ded388c562e4bde9e58ce205e5fa01b9734fcd434d496eb7b4fbfe9b927d",
    ),
    Library(
        "bootstrap.min.js",
        "bootstrap@3.1.1",
        "dist/js/bootstrap.min.js",
        "898d05a17f2cfc5120ddcdba47a885c378c0b466f30f0700e502757e24b403a1",
    ),
    Library(
        "bootstrap.min.css",
        "bootstrap@3.1.1",
        "dist/css/bootstrap.min.css",
        "e9503448692b738dd260fbd7f7cabf2e11f09b600fa97e6eb3a56eba5b1a7e9b",
    ),
)
_ELSEWHERE = re.compile(r'(?P<attribute>src|href)="(?P<address>https://[^"]+\.(?:js|css))"(?P<rest>[^>]*)>')


def vendor(page: Path, kept: Path = KEPT) -> None:
    """Makes the page load every library from its own folder, into which the files are copied.

    Raises:
        ValueError: the page loads a file that is not known, or a file has another hash.
        RuntimeError: npm is not there, or failed.
    """
    known = {library.named: library for library in LIBRARIES}

    def local(match: re.Match[str]) -> str:
        name = match["address"].rsplit("/", 1)[1]
        if name not in known:
            raise ValueError(f"{page} loads {match['address']}, which is not among the libraries that are known")
        shutil.copyfile(fetched(known[name], kept), page.parent / known[name].file)
        return f'{match["attribute"]}="{known[name].file}"{_without_checks(match["rest"])}>'

    page.write_text(_ELSEWHERE.sub(local, page.read_text(encoding="utf-8")), encoding="utf-8")


def fetched(library: Library, kept: Path) -> Path:
    """The file of the library, from the kept ones or from npm."""
    file = kept / library.package / library.file
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(_from_npm(library))
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != library.sha256:
        file.unlink()
        raise ValueError(f"{library.member} of {library.package} has sha256 {found}, not {library.sha256}")
    return file


def _from_npm(library: Library) -> bytes:
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError("npm is needed to fetch the libraries of asv's pages; it comes with Node.js")
    with tempfile.TemporaryDirectory() as folder:
        words = [npm, "pack", "--silent", "--pack-destination", folder, library.package]
        ended = subprocess.run(words, stdout=sys.stderr, check=False)
        archives = list(Path(folder).glob("*.tgz"))
        if ended.returncode or not archives:
            raise RuntimeError(f"npm pack {library.package} ended with {ended.returncode}")
        with tarfile.open(archives[0]) as archive:
            member = next(each for each in archive.getnames() if each.split("/", 1)[-1] == library.member)
            content = archive.extractfile(member)
            assert content is not None
            return content.read()


def _without_checks(attributes: str) -> str:
    """The attributes of a tag without those that make sense for other sites alone."""
    return re.sub(r'\s*(integrity|crossorigin|referrerpolicy)="[^"]*"', "", attributes)
