# Both images: `docker build -f deploy/images.Dockerfile --target receiver .` or `--target agent`, from the root of the repository.
# `cargo images` writes the same programs as OCI layouts without a container daemon, and their bills of materials.
# A release sets both base images by digest (`name@sha256:…`), so that the same source gives the same image.
ARG BUILD_IMAGE=docker.io/library/rust:1.95-bookworm
ARG RUN_IMAGE=gcr.io/distroless/cc-debian12:nonroot

FROM ${BUILD_IMAGE} AS build
WORKDIR /source
COPY . .
RUN cargo build --profile agent --locked --package tidewatch-agent
RUN cargo build --release --locked --package tidewatch-receiver --features jemalloc
RUN cargo build --release --locked --package tidewatch-cli

FROM ${RUN_IMAGE} AS agent
COPY --from=build /source/target/agent/tidewatch-agent /tidewatch-agent
ENTRYPOINT ["/tidewatch-agent"]

FROM ${RUN_IMAGE} AS receiver
COPY --from=build /source/target/release/tidewatch-receiver /tidewatch-receiver
# The operators' program, for `kubectl exec`.
COPY --from=build /source/target/release/tidewatch /tidewatch
ENTRYPOINT ["/tidewatch-receiver"]
