"""Where the kernel comes from: `kernels.get_kernel` and nothing else. To be imported before torch and kernels.

Unless LOCAL_KERNELS says otherwise, that resolves to the build in this repository.
"""

import os
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
os.environ.setdefault("LOCAL_KERNELS", f"kernels-community/tdt-loss={REPO}")  # read when kernels is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads cost seconds where another process holds a core
