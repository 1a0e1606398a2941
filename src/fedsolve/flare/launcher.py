"""The way in which a site starts a job's process."""

from __future__ import annotations

import sys

from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobHandleSpec, JobReturnCode
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher

ENDED = (
    "This site's process for a run has ended before the run: killed, or out of memory. The site"
    " takes part again in the run's next job."
)


class TolerantLauncher(ClientProcessJobLauncher):
    """Keep a job running on the other sites when this site's job process is killed.

    FLARE ends the whole job for the return code EXECUTION_ERROR, but not for UNKNOWN.
    """

    def launch_job(self, job_meta: dict, fl_ctx: FLContext) -> JobHandleSpec:
        """Start a job's process; its handle reports UNKNOWN in place of EXECUTION_ERROR."""
        handle = super().launch_job(job_meta, fl_ctx)
        poll = handle.poll

        told: list[str] = []

        def tolerant() -> int:
            code = poll()
            if code != JobReturnCode.EXECUTION_ERROR:
                return code
            if not told:
                told.append(ENDED)
                print(ENDED, file=sys.stderr, flush=True)
            return JobReturnCode.UNKNOWN

        handle.poll = tolerant
        return handle
