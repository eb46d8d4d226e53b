"""The form of KubeRay 1.6's resources (ray.io/v1): which fields there are, which must be there, and their types.

After the operator's Go types and its API reference; pod templates inside are checked against Kubernetes' own schemas.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import kubernetes_validate
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, model_validator

KUBERNETES = kubernetes_validate.latest_version()


class Form(BaseModel):
    model_config = ConfigDict(extra="forbid")


def _pod(template: dict[str, Any]) -> dict[str, Any]:
    """A pod template is a pod without its head."""
    metadata = {"name": "pod", **template.get("metadata", {})}
    pod = {**template, "apiVersion": "v1", "kind": "Pod", "metadata": metadata}
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    return template


PodTemplate = Annotated[dict[str, Any], AfterValidator(_pod)]
StartParams = dict[StrictStr, StrictStr]  # numbers in YAML would be refused by the API server


class Metadata(Form):
    name: StrictStr = Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,45}[a-z0-9])?$")  # services and pods are named after it
    namespace: StrictStr | None = None
    labels: dict[StrictStr, StrictStr] = {}
    annotations: dict[StrictStr, StrictStr] = {}


class AuthOptions(Form):
    mode: Literal["disabled", "token"]
    secretName: StrictStr | None = None
    enableK8sTokenAuth: StrictBool | None = None


class AutoscalerOptions(Form):
    resources: dict[str, Any] | None = None
    image: StrictStr | None = None
    imagePullPolicy: Literal["Always", "IfNotPresent", "Never"] | None = None
    securityContext: dict[str, Any] | None = None
    env: list[dict[str, Any]] | None = None
    envFrom: list[dict[str, Any]] | None = None
    volumeMounts: list[dict[str, Any]] | None = None
    idleTimeoutSeconds: StrictInt | None = None
    upscalingMode: Literal["Default", "Aggressive", "Conservative"] | None = None
    version: Literal["v1", "v2"] | None = None


class HeadGroup(Form):
    template: PodTemplate
    rayStartParams: StartParams = {}
    serviceType: Literal["ClusterIP", "NodePort", "LoadBalancer"] | None = None
    headService: dict[str, Any] | None = None
    enableIngress: StrictBool | None = None
    resources: dict[StrictStr, StrictStr] | None = None
    labels: dict[StrictStr, StrictStr] | None = None


class WorkerGroup(Form):
    groupName: StrictStr
    template: PodTemplate
    minReplicas: StrictInt = Field(ge=0)
    maxReplicas: StrictInt = Field(ge=0)
    replicas: StrictInt | None = Field(None, ge=0)
    rayStartParams: StartParams = {}
    suspend: StrictBool | None = None
    resources: dict[StrictStr, StrictStr] | None = None
    labels: dict[StrictStr, StrictStr] | None = None
    scaleStrategy: dict[str, Any] | None = None
    numOfHosts: StrictInt | None = None
    idleTimeoutSeconds: StrictInt | None = None

    @model_validator(mode="after")
    def _bounds(self) -> WorkerGroup:
        assert self.minReplicas <= (self.replicas or 0) <= self.maxReplicas, "replicas out of their bounds"
        return self


class ClusterSpec(Form):
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup] = []
    rayVersion: StrictStr | None = None
    authOptions: AuthOptions | None = None
    enableInTreeAutoscaling: StrictBool | None = None
    autoscalerOptions: AutoscalerOptions | None = None
    headServiceAnnotations: dict[StrictStr, StrictStr] | None = None
    gcsFaultToleranceOptions: dict[str, Any] | None = None
    suspend: StrictBool | None = None
    managedBy: StrictStr | None = None


class JobSpec(Form):
    entrypoint: StrictStr
    rayClusterSpec: ClusterSpec | None = None
    clusterSelector: dict[StrictStr, StrictStr] | None = None
    submissionMode: Literal["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"] = "K8sJobMode"
    backoffLimit: StrictInt | None = None
    activeDeadlineSeconds: StrictInt | None = Field(None, gt=0)
    shutdownAfterJobFinishes: StrictBool = False
    ttlSecondsAfterFinished: StrictInt = Field(0, ge=0)
    runtimeEnvYAML: StrictStr | None = None
    jobId: StrictStr | None = None
    metadata: dict[StrictStr, StrictStr] | None = None
    submitterPodTemplate: PodTemplate | None = None
    submitterConfig: dict[str, Any] | None = None
    entrypointNumCpus: float | None = None
    entrypointNumGpus: float | None = None
    entrypointResources: StrictStr | None = None
    suspend: StrictBool | None = None

    @model_validator(mode="after")
    def _one_cluster(self) -> JobSpec:
        assert (self.rayClusterSpec is None) != (self.clusterSelector is None), "one of cluster spec and selector"
        assert self.ttlSecondsAfterFinished == 0 or self.shutdownAfterJobFinishes, "a TTL without a shutdown"
        return self


class RayCluster(Form):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayCluster"]
    metadata: Metadata
    spec: ClusterSpec


class RayJob(Form):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayJob"]
    metadata: Metadata
    spec: JobSpec
