"""`megatrain report`: a run as one page. Read `page.py` first."""

from megatrain.report.page import write_report
