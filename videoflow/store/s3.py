"""S3 and its like: endpoint, region and credentials from where every AWS tool looks for them (environment, profile
files, instance roles), through botocore. Nothing found here is stored or printed.

Lance finds credentials in the same places by itself and renews them; it is only told the endpoint and the region.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from videoflow.errors import MissingExtra, SystemFailure
from videoflow.persist import REQUEST_RETRIES, hide, persist, storage_failure

#: How long obstore may keep credentials that are renewed now and then.
_RENEW_AFTER = timedelta(minutes=5)


@dataclass(frozen=True)
class Upload:
    """A multipart upload that was begun and neither completed nor aborted."""

    key: str
    upload_id: str
    initiated: datetime


class S3Access:
    """How to reach one bucket.

    Raises:
        MissingExtra: botocore is not installed. SystemFailure: there are no credentials, or no such profile.
    """

    def __init__(self, url: str) -> None:
        try:
            import botocore.session
        except ImportError as e:
            raise MissingExtra("botocore", needed_for=f"a catalog at {url}", extra="s3") from e
        self._url = url
        self.bucket = urlsplit(url).netloc
        self._session = botocore.session.get_session()
        try:
            self._credentials = self._session.get_credentials()
        except Exception as e:  # botocore's many: a profile that is not there, a helper program that fails
            raise storage_failure(f"cannot find credentials for {url}", e) from e
        if self._credentials is None:
            raise SystemFailure(
                f"no credentials for {url}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, and run "
                "the same command again"
            )
        self.credentials()

    def credentials(self) -> dict[str, Any]:
        """What obstore asks for whenever its credentials have run out."""
        now = self._credentials.get_frozen_credentials()
        hide(now.access_key, now.secret_key, now.token)
        renews = hasattr(self._credentials, "refresh_needed")
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.now(UTC) + _RENEW_AFTER if renews else None,
        }

    @cached_property
    def _client(self) -> Any:
        from botocore.config import Config

        retries = {"max_attempts": REQUEST_RETRIES + 1, "mode": "standard"}
        return self._session.create_client("s3", config=Config(retries=retries))

    @cached_property
    def place(self) -> dict[str, str]:
        """Endpoint and region as obstore and Lance take them; without an endpoint of one's own both know AWS's."""
        endpoint = str(self._client.meta.endpoint_url)
        is_aws = (urlsplit(endpoint).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))
        region = self._session.get_config_variable("region") or ("" if is_aws else "us-east-1")
        found = {} if is_aws else {"aws_endpoint": endpoint.rstrip("/")}
        return found | ({"aws_region": region} if region else {})

    @property
    def is_plain_http(self) -> bool:
        """True for an endpoint without TLS, which has to be allowed."""
        return self.place.get("aws_endpoint", "").startswith("http://")

    # -- multipart uploads, which neither obstore nor Lance lists ----------------------------------------------------

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Unfinished uploads of objects below a prefix."""
        pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self.bucket, Prefix=prefix)
        for page in persist(lambda: list(pages)):
            for u in page.get("Uploads") or ():
                if u["Key"].startswith(prefix):
                    yield Upload(u["Key"], u["UploadId"], u["Initiated"])

    def upload_bytes(self, upload: Upload) -> int:
        """Bytes of the parts that have arrived; 0 if the upload has ended meanwhile."""
        what = {"Bucket": self.bucket, "Key": upload.key, "UploadId": upload.upload_id}
        try:
            pages = persist(lambda: list(self._client.get_paginator("list_parts").paginate(**what)))
        except OSError:
            return 0
        return sum(int(part["Size"]) for page in pages for part in page.get("Parts") or ())

    def abort(self, upload: Upload) -> None:
        """End an upload and free its parts; one that has ended meanwhile is fine."""
        what = {"Bucket": self.bucket, "Key": upload.key, "UploadId": upload.upload_id}

        def ask() -> None:
            try:
                self._client.abort_multipart_upload(**what)
            except self._client.exceptions.NoSuchUpload:
                return

        persist(ask)
