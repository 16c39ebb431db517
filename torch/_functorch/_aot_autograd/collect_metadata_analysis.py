"""Record how inputs were edited, in upstream's file (a sketch: see tools/overlay.py)."""

from .input_edit_analysis import (
    data_tracked_by_autograd,
    edited_in_inference_mode,
    in_place_views,
    overlaps_itself,
    tracked_by_autograd,
)


def run_functionalized_fw_and_collect_metadata(f):
    ...

    def inner(*flat_args):
        ...
        for arg, f_arg in zip(flat_args, flat_f_args):
            ...
            input_info.append(
                InputAliasInfo(
                    ...,
                    tracked_by_autograd=tracked_by_autograd(f_arg),
                    data_tracked_by_autograd=data_tracked_by_autograd(f_arg),
                    in_place_views=in_place_views(f_arg),
                    overlaps_itself=overlaps_itself(arg),
                    edited_in_inference_mode=edited_in_inference_mode(f_arg),
                )
            )
        ...

    ...
