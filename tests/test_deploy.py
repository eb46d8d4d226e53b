"""What lies in deploy/ has the form that Docker, Compose, Kubernetes and KubeRay want, and its parts fit together."""

from __future__ import annotations

import copy
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer.main
import yaml
from dockerfile_parse import DockerfileParser
from pydantic import ValidationError

from tests.kuberay_form import RayCluster, RayJob
from videoflow.cli.app import app

REPO = Path(__file__).parent.parent
DEPLOY = REPO / "deploy"
README = (DEPLOY / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
IMAGE = f"registry.example.org/videoflow:{PROJECT['version']}"


def load(name: str) -> dict[str, Any]:
    (document,) = yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8"))
    return document


CLUSTER, JOB, COMPOSE = load("kuberay/raycluster.yaml"), load("kuberay/rayjob.yaml"), load("compose.yaml")
SPECS = {"RayCluster": CLUSTER["spec"], "RayJob": JOB["spec"]["rayClusterSpec"]}


# -- the image -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dockerfile() -> DockerfileParser:
    return DockerfileParser(str(DEPLOY / "Dockerfile"))


def steps(dockerfile: DockerfileParser, *kinds: str) -> list[str]:
    return [s["value"] for s in dockerfile.structure if s["instruction"] in kinds]


def test_the_image_stands_on_a_pinned_version_and_on_its_own_stages(dockerfile: DockerfileParser) -> None:
    args = dict(a.split("=", 1) for a in steps(dockerfile, "ARG"))
    made: set[str] = set()
    outside = []
    for step in steps(dockerfile, "FROM"):
        base, _, name = step.partition(" AS ")
        for choice in ("cpu", "cuda"):
            chosen = re.sub(r"\$\{(\w+)\}", lambda m: {**args, "DEVICE": choice}[m[1]], base)  # noqa: B023
            if chosen not in made:
                outside.append(chosen)
        made.add(name)
    assert set(outside) == {f"python:{args['PYTHON']}"}
    assert re.fullmatch(r"3\.\d+\.\d+-slim-\w+", args["PYTHON"]) and args["DEVICE"] == "cpu"


def test_the_image_installs_ffmpeg_and_torch_first(dockerfile: DockerfileParser) -> None:
    runs = steps(dockerfile, "RUN")
    (system,) = [r for r in runs if "apt-get install" in r]
    assert {"ffmpeg", "wget"} <= set(system.split()) and "rm -rf /var/lib/apt/lists" in system
    installs = [r for r in runs if "pip install" in r]
    assert "^torch==" in installs[0] and all("-c constraints.txt" in r for r in installs)
    (torch,) = re.findall(r"^torch==\S+", (REPO / "constraints.txt").read_text(), re.MULTILINE)
    assert torch
    order = [(s["instruction"], s["value"]) for s in dockerfile.structure]
    first_copy = next(v for k, v in order if k == "COPY")
    assert first_copy.split() == ["constraints.txt", "./"]  # else every change of code installs torch anew


def test_the_image_asks_for_extras_that_exist(dockerfile: DockerfileParser) -> None:
    args = dict(a.split("=", 1) for a in steps(dockerfile, "ARG"))
    named = {*args["EXTRAS"].split(",")}
    for text in [*steps(dockerfile, "RUN"), README, *map(str, PROJECT["optional-dependencies"])]:
        named |= {e for group in re.findall(r"'?\.\[([\w,-]+)\]", text) for e in group.split(",")}
    named |= {e for group in re.findall(r"EXTRAS=([\w,-]+)", README) for e in group.split(",")}
    assert named <= set(PROJECT["optional-dependencies"]) and "cluster" in named


def test_the_image_runs_as_a_user_and_starts_videoflow(dockerfile: DockerfileParser) -> None:
    order = [s["instruction"] for s in dockerfile.structure]
    (user,) = steps(dockerfile, "USER")
    assert user not in ("root", "0") and f"--uid 1000 {user}" in " ".join(steps(dockerfile, "RUN"))
    assert "RUN" not in order[order.index("USER") :]
    assert steps(dockerfile, "ENTRYPOINT") == ['["videoflow"]'] and steps(dockerfile, "CMD") == ['["--help"]']
    assert "videoflow" in PROJECT["scripts"]
    assert "VIDEOFLOW_PYTHON=/usr/local/bin/python3" in steps(dockerfile, "ENV")


def test_what_the_image_copies_is_there_and_nothing_else_is_sent(dockerfile: DockerfileParser) -> None:
    copied = {p for step in steps(dockerfile, "COPY") for p in step.split()[:-1]}
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    ignore = [t for t in lines if t and not t.startswith("#")]
    assert ignore[0] == "*"
    assert {t[1:] for t in ignore if t.startswith("!")} == copied
    assert all((REPO / p).exists() for p in copied)
    packages = set(tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])  # fmt: skip
    assert packages | {"pyproject.toml", "README.md", "constraints.txt"} <= copied
    assert any(fnmatch("videoflow/__pycache__", t.replace("**/", "*/")) for t in ignore[1:])


# -- Kubernetes ------------------------------------------------------------------------------------------------------


def test_the_resources_have_kuberays_form() -> None:
    RayCluster.model_validate(CLUSTER)
    RayJob.model_validate(JOB)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("apiVersion",), "ray.io/v2"),
        (("spec", "headGroupSpec"), None),
        (("spec", "headGroup"), {}),
        (("spec", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
        (("spec", "headGroupSpec", "template", "spec", "containers"), None),
        (("spec", "headGroupSpec", "template", "spec", "containers", 0, "imag"), "x"),
        (("spec", "headGroupSpec", "template", "spec", "containers", 0, "ports", 0, "containerPort"), "6379"),
        (("spec", "workerGroupSpecs", 0, "groupName"), None),
        (("spec", "workerGroupSpecs", 0, "replicas"), 1000),
    ],
)
def test_the_form_refuses_what_is_wrong(path: tuple[Any, ...], value: object) -> None:
    wrong = copy.deepcopy(CLUSTER)
    at: Any = wrong
    for key in path[:-1]:
        at = at[key]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    with pytest.raises((ValidationError, kubernetes_validate.ValidationError)):
        RayCluster.model_validate(wrong)


@pytest.mark.parametrize("kind", SPECS)
def test_nodes_of_a_cluster_fit_together(kind: str) -> None:
    spec = SPECS[kind]
    (ray,) = re.findall(r"^ray==(\S+)$", (REPO / "constraints.txt").read_text(), re.MULTILINE)
    assert spec["rayVersion"] == ray
    assert spec["authOptions"] == {"mode": "token"}
    head, *workers = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    assert workers
    for group in (head, *workers):
        (container,) = group["template"]["spec"]["containers"]
        device = "cuda" if "nvidia.com/gpu" in container["resources"]["limits"] else "cpu"
        assert container["image"] == f"{IMAGE}-{device}"
        assert container["envFrom"] == [{"secretRef": {"name": "videoflow-bucket"}}]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert container["securityContext"]["runAsUser"] == 1000
        assert set(group["rayStartParams"]) <= {o.removeprefix("--") for o in ray_start_options()}
    ports = {p["name"]: p["containerPort"] for p in head["template"]["spec"]["containers"][0]["ports"]}
    assert ports == {"gcs-server": 6379, "dashboard": 8265}


def test_the_readme_names_what_the_resources_are_called() -> None:
    text = re.sub(r"\\\n\s*", "", README)
    name = CLUSTER["metadata"]["name"]
    assert f"kubectl port-forward service/{name}-head-svc 8265:8265" in text
    assert f"kubectl get secret {name} --template='{{{{.data.auth_token}}}}'" in text
    assert f"raycluster/{name}" in text and f"kubectl get rayjob {JOB['metadata']['name']}" in text
    assert "kubectl create secret generic videoflow-bucket " in text
    for path in re.findall(r"deploy/[\w./-]+", " ".join(t for _, t in BLOCKS)):
        assert (REPO / path).is_file(), path
    assert set(re.findall(r"registry\.example\.org/videoflow:[\w.-]+", README)) == {f"{IMAGE}-cpu", f"{IMAGE}-cuda"}


# -- Docker Compose and bare machines --------------------------------------------------------------------------------


def test_the_compose_file_makes_a_cluster() -> None:
    services = COMPOSE["services"]
    assert set(services) == {"head", "worker"}
    for service in services.values():
        assert service["image"] == f"{IMAGE}-cpu"
        assert (DEPLOY / service["build"]["context"]).resolve() == REPO
        assert (REPO / service["build"]["dockerfile"]).is_file()
        assert service["environment"]["RAY_AUTH_MODE"] == "token"
        assert service["environment"]["RAY_AUTH_TOKEN"].startswith("${RAY_AUTH_TOKEN:?")
        assert service["entrypoint"][:2] == ["ray", "start"] and "--block" in service["entrypoint"]
        options = {o.split("=")[0] for o in service["entrypoint"][2:]}
        assert options <= ray_start_options(), options - ray_start_options()
    head, worker = services["head"]["entrypoint"], services["worker"]["entrypoint"]
    assert {"--head", "--port=6379", "--dashboard-port=8265"} <= set(head) and "--address=head:6379" in worker
    assert services["head"]["ports"] == ["127.0.0.1:8265:8265"]  # with a token, but without TLS
    assert services["worker"]["depends_on"] == {"head": {"condition": "service_healthy"}}


@cache
def ray_start_options() -> frozenset[str]:
    from ray.scripts.scripts import start

    return frozenset(o for p in start.params for o in p.opts)


def test_ray_commands_of_the_readme_exist() -> None:
    commands = [c for c in commands_of_readme() if c[0].endswith("/ray")]
    assert [c[1] for c in commands] == ["start", "start"]
    for command in commands:
        assert {a.split("=")[0] for a in command[2:]} <= ray_start_options()


# -- commands --------------------------------------------------------------------------------------------------------


def commands_of_readme() -> Iterator[list[str]]:
    """Words of every simple command in the README's bash blocks."""
    for language, text in BLOCKS:
        if language == "bash":
            for line in re.sub(r"\\\n\s*", " ", text).splitlines():
                inner = re.sub(r"^\w+=\$\((.*)\)$", r"\1", line.strip())
                yield shlex.split(inner.split(" | ")[0].removesuffix("&"))


def parse_command(words: list[str]) -> None:
    """What the command line makes of a command; nothing runs.

    Raises:
        no such command or option, or a missing one (an error of the library inside typer).
    """
    command: Any = typer.main.get_command(app)
    context = command.make_context("videoflow", [], resilient_parsing=True)
    rest = words
    while hasattr(command, "commands"):
        name, *rest = rest
        assert name in command.commands, f"no command {name!r}"
        command = command.commands[name]
        context = command.make_context(name, list(rest), parent=context, resilient_parsing="--help" in rest)


def test_videoflow_commands_exist_with_their_options() -> None:
    found = [c[1:] for c in commands_of_readme() if c[0] == "videoflow"]
    found += [shlex.split(JOB["spec"]["entrypoint"])[1:]]
    found += [c[c.index(f"{IMAGE}-cpu") + 1 :] for c in commands_of_readme() if c[:2] == ["docker", "run"] and "plan" in c]  # fmt: skip
    front = (REPO / "README.md").read_text(encoding="utf-8")
    found += [shlex.split(line)[1:] for line in front.splitlines() if line.startswith("videoflow submit ")]
    assert {c[0] for c in found} >= {"plan", "run", "submit", "status", "logs", "cancel", "resume", "jobs", "query"}
    for words in found:
        parse_command(words)
    assert shlex.split(JOB["spec"]["entrypoint"])[0] in PROJECT["scripts"]


@pytest.mark.parametrize("words", [["submits"], ["submit", "clips", "--rot", "x"], ["submit", "clips", "--root", "x"]])
def test_a_wrong_command_would_be_seen(words: list[str]) -> None:
    with pytest.raises(Exception, match=r"No such option|Missing parameter|no command"):
        parse_command(words)


def test_options_in_the_text_exist() -> None:
    mine = {o for o in re.findall(r"`(--[a-z-]+)", README) if o != "--build-arg"}
    command: Any = typer.main.get_command(app)
    known = {o for c in command.commands.values() for p in c.params for o in p.opts}
    assert mine and mine <= known, mine - known


def test_blocks_parse() -> None:
    assert {language for language, _ in BLOCKS} == {"bash", "python"}
    for language, text in BLOCKS:
        if language == "python":
            compile(text, "README.md", "exec")
        else:
            done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
            assert done.returncode == 0, f"{done.stderr}\n{text}"


def test_nothing_secret_lies_here() -> None:
    texts = [p.read_text(encoding="utf-8") for p in DEPLOY.rglob("*") if p.is_file()]
    assert len(texts) >= 6
    for text in texts:
        assert not re.search(r"AKIA[0-9A-Z]{16}|auth_token=\S|SECRET_ACCESS_KEY[=:] *[^\s\"$-]", text)
    assert os.access(DEPLOY / "README.md", os.R_OK)
