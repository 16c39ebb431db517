"""Merge what is known of aliased inputs' edits (a sketch: see tools/overlay.py)."""

from .input_edit_analysis import (
    merged_in_place_views,
    merged_inference_mode,
    merged_overlap,
    merged_tracking,
)


def create_synthetic_base_metadata(m, outer_args, inner_args):
    ...
    for outer_indices in synthetic_base_to_indices.values():
        ...
        inpt_info = InputAliasInfo(
            ...,
            tracked_by_autograd=merged_tracking(m.input_info, outer_indices),
            data_tracked_by_autograd=merged_tracking(m.input_info, outer_indices),
            in_place_views=merged_in_place_views(m.input_info, outer_indices),
            overlaps_itself=merged_overlap(m.input_info, outer_indices),
            edited_in_inference_mode=merged_inference_mode(m.input_info, outer_indices),
        )
        ...
    ...
