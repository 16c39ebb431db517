"""What is known of an input's edits, in upstream's file (a sketch: see tools/overlay.py)."""


class InputAliasInfo:
    ...
    keep_input_mutations: bool
    # See input_edit_analysis.py. None where whoever made this did not record it.
    tracked_by_autograd: bool | None = field(default=None, compare=False)
    data_tracked_by_autograd: bool | None = field(default=None, compare=False)
    in_place_views: tuple[Any, ...] | None = field(default=None, compare=False)
    overlaps_itself: bool | None = field(default=None, compare=False)
    edited_in_inference_mode: bool | None = field(default=None, compare=False)
    ...
