"""The hook into upstream's file of this name (a sketch: see tools/overlay.py)."""

from .mutation_epilogue_codegen import codegen_mutation_epilogue


class RuntimeWrapper:
    ...

    def post_compile(self, aot_config):
        ...
        return _create_runtime_wrapper(
            ...,
            input_sources=aot_config.aot_autograd_arg_pos_to_source,
        )


class _RuntimeForwardEpilogue:
    ...

    def _apply_input_mutations(self, orig_inputs, updated_inputs):
        self._apply_input_mutations = codegen_mutation_epilogue(  # type: ignore[method-assign]
            self.runtime_metadata, trace_joint=self.trace_joint
        )
        self._apply_input_mutations(orig_inputs, updated_inputs)


def _create_runtime_wrapper(
    runtime_metadata, trace_joint, *, input_sources: Sequence[Any] | None = None
):
    ...
    if runtime_metadata.num_mutated_inp_runtime_indices > 0:
        codegen_apply_mutations = codegen_mutation_epilogue(
            runtime_metadata, trace_joint=trace_joint, input_sources=input_sources
        )
        runtime_epilogue._apply_input_mutations = codegen_apply_mutations  # type: ignore[method-assign]
    ...
