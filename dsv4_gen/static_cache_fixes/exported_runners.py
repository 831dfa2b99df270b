"""The hook through which programs that upstream's exporters saved run with their state."""

from collections.abc import Callable


def runners_hook(original: Callable) -> Callable:
    """For `ExportedModel.to`, which makes the runners: an OpenVINO program with variables gets one that knows them."""

    def to(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if self.export_format == "openvino":
            from .openvino_state import OpenVINORunnerWithState  # here, since OpenVINO need not be there

            for name, runner in self.runners.items():
                if runner.request.query_state():
                    self.runners[name] = OpenVINORunnerWithState(runner.compiled_model, runner.metadata)
        return self

    return to
