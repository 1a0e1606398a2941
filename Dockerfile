# Simulations and experiments.
#
#   docker build -t fedsolve .
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" fedsolve run neyman-pearson
FROM python:3.12-slim AS build
WORKDIR /source
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY src src
RUN python -m venv /opt/fedsolve \
    && /opt/fedsolve/bin/pip install --no-cache-dir -c constraints.txt .

FROM python:3.12-slim
COPY --from=build /opt/fedsolve /opt/fedsolve
# Caches of plots and compiled programs, writable for any user.
ENV PATH=/opt/fedsolve/bin:$PATH HOME=/tmp
WORKDIR /work
USER 1000:1000
ENTRYPOINT ["fedsolve"]
CMD ["list"]
