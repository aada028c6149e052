"""Offers apex's interface from before `initialize`: handles, FP16_Optimizer, float16 by hand.

`thalweg.amp` and `thalweg.amp.fp16_utils` have the public names.
"""
