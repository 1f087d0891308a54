"""What the project and some of its extras need, one requirement a line:  requirements.py PYPROJECT EXTRA...

So an image can have all of it in a layer of its own, which a change of the project does not touch.
"""

import sys
import tomllib
from pathlib import Path

path, *extras = sys.argv[1:]
project = tomllib.loads(Path(path).read_text())["project"]
known = project["optional-dependencies"]
if unknown := [extra for extra in extras if extra not in known]:
    sys.exit(f"requirements: no extra is called {', '.join(unknown)}; there are {', '.join(known)}")
needs = [*project["dependencies"], *(requirement for extra in extras for requirement in known[extra])]
sys.stdout.writelines(f"{requirement}\n" for requirement in needs)
