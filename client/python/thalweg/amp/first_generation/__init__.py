"""What apex offered before `initialize`: handles, FP16_Optimizer, and networks in float16 by hand.

`thalweg.amp` and `thalweg.amp.fp16_utils` have the public names.
"""
