# The engine image of the end-to-end tests: the router image, and torch, Mooncake and the kernels from the checkout
# that the test cluster's nodes mount into every container (node.py). The production engine with torch for CUDA is
# more than 5 GB, which no test machine should have to copy into two nodes.
ARG ROUTER=isthmus-router
FROM ${ROUTER}
USER 0:0
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends libcurl4 libgomp1 libibverbs1 libnuma1 libstdc++6 \
 && rm -rf /var/lib/apt/lists/*
# The image's own distributions come first; what it lacks is found on the mount.
RUN printf '%s\n' /opt/host/kernels/src /opt/host/site-packages \
        > "$(python -c 'import site; print(site.getsitepackages()[0])')/host.pth" \
 && printf '%s\n' '#!/opt/isthmus/bin/python' 'import sys' 'from mooncake.cli import main' 'sys.exit(main())' \
        > /opt/isthmus/bin/mooncake_master \
 && chmod 755 /opt/isthmus/bin/mooncake_master
LABEL org.opencontainers.image.title="isthmus-engine-for-tests"
USER 65532:65532
