"""How a site starts a job's process."""

from __future__ import annotations

from typing import Any

from nvflare.apis.job_launcher_spec import JobReturnCode
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher


class TolerantLauncher(ClientProcessJobLauncher):
    """A site whose job process was killed must not fail the job of all the others: FLARE ends the
    whole job for an execution error, and goes on for an unknown end."""

    def launch_job(self, job_meta: dict, fl_ctx: Any) -> Any:
        handle = super().launch_job(job_meta, fl_ctx)
        poll = handle.poll

        def tolerant() -> Any:
            code = poll()
            return JobReturnCode.UNKNOWN if code == JobReturnCode.EXECUTION_ERROR else code

        handle.poll = tolerant
        return handle
