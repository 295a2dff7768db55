import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "files"))  # uploads are made as their own tests make them
