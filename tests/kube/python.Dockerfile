# The stage `python` of deploy/Dockerfile, with torch from where the container runs: scripts/kube_cluster.sh.
FROM localhost/thalweg-debian
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv \
    && mkdir /opt/packages \
    && echo /opt/packages >/opt/venv/lib/python3.11/site-packages/packages.pth \
    && printf '#!/opt/venv/bin/python\nfrom torch.distributed.run import main\nmain()\n' >/opt/venv/bin/torchrun \
    && chmod 755 /opt/venv/bin/torchrun
ENV PATH=/opt/venv/bin:$PATH
