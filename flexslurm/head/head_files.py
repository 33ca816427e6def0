"""What a head reads before it begins: service, site, model and measured files; writes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from flexslurm.config.schema import load_section
from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.engine.families import check_model
from flexslurm.head.api_server import ApiServer
from flexslurm.head.plan_worker import PlanWorker
from flexslurm.head.planning import ServicePlanner
from flexslurm.wire.service_dir import ServiceDir


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """What the files say, and the parts of a head that are made of nothing else."""

    service: Service
    site: Site
    model_context: int
    """Tokens the model itself can take."""
    api: ApiServer
    plans: PlanWorker
    planner: ServicePlanner


def read_files(directory: ServiceDir) -> HeadFiles:
    """Raises ServiceError where no service is, ConfigError, ModelError."""
    directory.require()
    service = load_section(Service, directory.service)
    site = load_section(Site, directory.site)
    context = check_model(service.model.path).max_context
    plans = PlanWorker(directory.path)
    planner = ServicePlanner(service, site, plans.ask, directory.leaf_switches())
    plans.memory = lambda: planner.planned_memory
    return HeadFiles(
        service=service,
        site=site,
        model_context=context,
        api=ApiServer(service, context),
        plans=plans,
        planner=planner,
    )
