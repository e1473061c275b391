"""`megatrain report`: a run as one page. Read `page.py` first."""

from megatrain.report.page import write_data_page, write_report
