"""When a cause applies: one function a cause, from measurements to the evidence or None.

Every threshold has its reason beside it. :mod:`kl_term.diagnosis.causes` says what each means.
"""
