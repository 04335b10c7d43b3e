"""Where the cluster's programs are looked for."""

import shutil
from pathlib import Path

import pytest
from testcluster import binaries, settings
from testcluster.settings import Settings


@pytest.fixture
def ours(tmp_path: Path) -> Settings:
    return Settings(cache=tmp_path / "cache", assets=None, jobs=1, required=False, kubeconfig=None)


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    return path


def test_every_missing_program_is_named(ours: Settings) -> None:
    put(binaries.built_path(ours, "etcd"))
    with pytest.raises(binaries.MissingBinariesError, match="kube-apiserver, kwok; run 'make cluster-build'"):
        binaries.find(ours, ("etcd", "kube-apiserver", "kwok"))


def test_ready_control_plane_goes_before_ours(ours: Settings, tmp_path: Path) -> None:
    assets = tmp_path / "assets"
    with_assets = Settings(cache=ours.cache, assets=assets, jobs=1, required=False, kubeconfig=None)
    built = put(binaries.built_path(ours, "etcd"))
    put(assets / "etcd")
    assert binaries.find(with_assets, ("etcd",)).paths["etcd"] == built, "a folder without an API server is none"
    for name in binaries.ASSETS:
        put(assets / name)
    assert binaries.find(with_assets, ("etcd",)).paths["etcd"] == assets / "etcd"


def test_other_versions_are_built_elsewhere(ours: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = binaries.built_path(ours, "etcd")
    shutil.copytree(settings.TOOLS, tmp_path / "tools")
    monkeypatch.setattr(binaries, "TOOLS", tmp_path / "tools")
    assert binaries.built_path(ours, "etcd") == before
    with (tmp_path / "tools" / "etcd" / "go.sum").open("a") as sums:
        sums.write("example.org/other v1.0.0 h1:=\n")
    assert binaries.built_path(ours, "etcd") != before
    assert binaries.built_path(ours, "kwok").parent.name.startswith("kwok-")
    before = binaries.built_path(ours, "coredns")
    with (tmp_path / "tools" / "coredns" / "main.go").open("a") as main:
        main.write("// with another plugin\n")
    assert binaries.built_path(ours, "coredns") != before


def test_kubernetes_carries_its_version() -> None:
    linker = binaries.flags("kubernetes")[-1]
    version = binaries.module_version("kubernetes", "k8s.io/kubernetes")
    assert f"gitVersion={version}" in linker
    assert "gitMajor=1" in linker
