"""Offers apex's interface from before `initialize`: handles, and FP16_Optimizer with its scalers.

`thalweg.amp` and `thalweg.amp.fp16_utils` have the public names.
"""
