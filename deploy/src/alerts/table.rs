//! The alerts.

/// One alert rule and its runbook. Texts are Markdown.
pub(super) struct Alert {
    pub(super) name: &'static str,
    /// In PromQL.
    pub(super) expression: &'static str,
    /// How long the expression must hold before the alert fires, in Prometheus's notation.
    pub(super) pending: &'static str,
    /// `critical`: act now; `warning`: act within a working day.
    pub(super) severity: &'static str,
    /// One sentence without a full stop.
    pub(super) summary: &'static str,
    pub(super) meaning: &'static str,
    pub(super) checks: &'static str,
    pub(super) remedy: &'static str,
}

pub(super) const ALERTS: &[Alert] = &[
    Alert {
        name: "TidewatchNoActiveReceiver",
        expression: "absent(tidewatch_active == 1)",
        pending: "2m",
        severity: "critical",
        summary: "No receiver serves",
        meaning: "No event is accepted and no Kyma is reconciled. Agents keep their events and resend them later: nothing is lost. With \
                  several replicas, none has seen all shards held since its start; without `--relay-address`, none holds the shard.",
        checks: "`kubectl -n kcp-system get leases` shows the holders. Logs of the receiver pods name the failing step. Readiness (`/readyz`) \
                 lists pending caches, and `shards`.",
        remedy: "Restore the receiver's access to the API server of the control plane, or fix the configuration error named in its log. \
                 Reconciles of changed Kymas start first after the return.",
    },
    Alert {
        name: "TidewatchShardWithoutHolder",
        expression: "sum(tidewatch_shards_held) < max(tidewatch_shards)",
        pending: "75s",
        severity: "critical",
        summary: "A shard has no holder for longer than a take-over needs",
        meaning: "The runtimes of the shard are not reconciled, and their requests are answered 503: agents keep their events. A take-over \
                  ends within `--lease-seconds` (15) and a moment; with a longer duration, raise the time of this alert by the difference.",
        checks: "`tidewatch_shards_refused` by reason shows why replicas claim no shard; `tidewatch shards` shows which shard has no \
                 holder; `kubectl -n kcp-system get leases` shows whether a Lease `tidewatch-shard-…` is missing; \
                 `tidewatch_shard_lease_writes_total{outcome=\"failed\"}` and the logs show failed writes.",
        remedy: "Restore the API server of the control plane, or the Leases and the Role by applying `deploy/base` again: see \
                 [replicas](replicas.md#failures).",
    },
    Alert {
        name: "TidewatchFleetRoleWithoutHolder",
        expression: "sum(tidewatch_fleet_role_held) == 0",
        pending: "75s",
        severity: "warning",
        summary: "No replica runs the tasks of the whole fleet",
        meaning: "Rotation of the CA, upgrade of agents and ring rollouts stand still. Runtimes are served.",
        checks: "The Lease `tidewatch-fleet` and its holder; `tidewatch_shards_refused` by reason.",
        remedy: "That of a [shard without a holder](#tidewatchshardwithoutholder).",
    },
    Alert {
        name: "TidewatchReplicaClaimsNoShard",
        expression: "tidewatch_shards_refused{reason!=\"standby\"} == 1",
        pending: "5m",
        severity: "warning",
        summary: "A replica claims no shard, or lacks a Lease",
        meaning: "The other replicas have its share, except that a missing Lease of a shard affects that shard alone. By reason, \
                  `other-count`: live replicas have another number of shards, or no relay; `no-membership`: eight replicas live already; \
                  `lease-missing`: the installation lacks a Lease; `unconfirmed`: it cannot renew its Lease.",
        checks: "The reason, and the log of that replica.",
        remedy: "See [replicas](replicas.md#a-replica-that-claims-no-shard).",
    },
    Alert {
        name: "TidewatchSharesUneven",
        expression: "max(tidewatch_shards_held) - min(tidewatch_shards_held) > 2",
        pending: "10m",
        severity: "warning",
        summary: "Replicas hold shards unevenly",
        meaning: "Shares differ by two at most once the replicas have been the same for a Lease duration. One replica carries more load; \
                  nothing else is affected.",
        checks: "`tidewatch_shards_held` and `tidewatch_shards_wanted` by pod; `tidewatch_shards_refused`; \
                 `tidewatch_shards_ended_total{reason=\"hand-over-timeout\"}`; a replica that restarts again and again.",
        remedy: "Repair or restart the replica whose `tidewatch_shards_held` and `tidewatch_fleet_role_held` together are less than its \
                 `tidewatch_shards_wanted`.",
    },
    Alert {
        name: "TidewatchRelayFails",
        expression: "sum by (reason) (rate(tidewatch_relay_requests_refused_total{reason!~\"unknown|not-here\"}[5m])) > 0.1",
        pending: "10m",
        severity: "warning",
        summary: "Replicas cannot relay requests to each other",
        meaning: "Requests of runtimes that another replica holds are answered 503; their agents keep the events, and may reach the holder \
                  with another connection. The reasons `unknown` and `not-here` belong to hand-overs and do not count.",
        checks: "By reason, `gone`: network policy and address in the Lease of the replica, `tidewatch_relay_connections_total{outcome=\"failed\"}`, \
                 the certificates of both and the roots that each trusts; `full` or `share`: CPU of the holder; \
                 `late` or `broken`: its log and `tidewatch_gateway_lag_seconds`.",
        remedy: "Open the relay port (8445) between the pods; restart the replica that does not respond; raise its CPU.",
    },
    Alert {
        name: "TidewatchReplicaCertificateExpiring",
        expression: "min(tidewatch_relay_certificate_end_timestamp_seconds > 0) - time() < 14400",
        pending: "10m",
        severity: "critical",
        summary: "The certificate of a replica expires within four hours",
        meaning: "A replica renews it when 8 of its 24 hours are left, so renewals have failed since. After its expiry no other replica \
                  relays to this one or accepts requests from it.",
        checks: "`tidewatch_relay_certificate_renewals_total{outcome=\"failed\"}`; the log of the replica names the error of the issuer, or \
                 of the files of `--relay-cert`.",
        remedy: "Restore the CA Secret, the issuer of cert-manager or the files: see [CA](ca.md).",
    },
    Alert {
        name: "TidewatchEventPathBroken",
        expression: "sum(tidewatch_fleet_paths{state=~\"NoHeartbeat|OldPlan|FailingWatch|Diverged|StaleCanary\"}) > 0",
        pending: "15m",
        severity: "warning",
        summary: "The event path of at least one runtime is not proven",
        meaning: "Those runtimes are polled at the fallback interval. Their changes are reconciled late, but are not lost.",
        checks: "`tidewatch fleet --check` lists the runtimes with the reason of their condition `EventPath`.",
        remedy: "Follow the section of that reason in [conditions](conditions.md#eventpath).",
    },
    Alert {
        name: "TidewatchDigestsDiffer",
        expression: "increase(tidewatch_fleet_digest_differences_total[1h]) > 0",
        pending: "0m",
        severity: "warning",
        summary: "An agent's digest differed from the digest expected from its events",
        meaning: "A defect in the agent or the receiver: an event was not counted, or was counted twice. The receiver has reconciled the \
                  runtime and requested a resend at once.",
        checks: "The receiver's log names the runtime and the watch. Note the versions of both programs.",
        remedy: "None is needed for the runtime. Report the defect with the log lines.",
    },
    Alert {
        name: "TidewatchEventsParked",
        expression: "tidewatch_fleet_agents_parked > 0",
        pending: "15m",
        severity: "warning",
        summary: "Agents hold events that the receiver or another manager refuses",
        meaning: "Parked events are retried every five minutes and with each new plan or receiver instance.",
        checks: "`tidewatch fleet` shows the count per runtime, `tidewatch status <kyma>` the watch.",
        remedy: "Upgrade the receiver before the agents; correct the Watcher whose service refuses events.",
    },
    Alert {
        name: "TidewatchUserChangesWait",
        expression: "max(tidewatch_queue_oldest_seconds{priority=\"user\"}) > 60",
        pending: "5m",
        severity: "warning",
        summary: "A user's change has waited for a reconcile for more than a minute",
        meaning: "All workers are busy, or the Kyma is in backoff after failures.",
        checks: "`tidewatch_queue_kymas` by place, `tidewatch_kyma_pass_duration_seconds`, `tidewatch_kyma_passes_total` by outcome; CPU of \
                 the receiver.",
        remedy: "Raise `--concurrency` and the CPU request, or repair the runtimes that fail or respond slowly.",
    },
    Alert {
        name: "TidewatchRegistryFails",
        expression: "tidewatch_oci_lookups_failed > 0",
        pending: "15m",
        severity: "warning",
        summary: "Artefacts of modules cannot be read from the registry, or are not trusted",
        meaning: "Modules that need these artefacts cannot be installed or upgraded and are in state Error. Installed modules are not \
                  affected.",
        checks: "The receiver's log names artefact and cause; `tidewatch_oci_fetches_total` and \
                 `tidewatch_oci_signature_verifications_total` count the causes.",
        remedy: "See [registry](registry.md#failures) and [signatures](signatures.md#refusals).",
    },
    Alert {
        name: "TidewatchKymasInError",
        expression: "count(lifecycle_mgr_kyma_state{state=\"Error\"} == 1) > 0",
        pending: "15m",
        severity: "warning",
        summary: "At least one Kyma is in state Error",
        meaning: "Its runtime cannot be reached, its CRDs or catalog cannot be applied, or the user's selection is invalid.",
        checks: "`kubectl -n kcp-system get kymas` shows the states; `status.lastOperation` and the conditions name the cause.",
        remedy: "Follow the section of the False condition in [conditions](conditions.md).",
    },
    Alert {
        name: "TidewatchModulesInError",
        expression: "sum by (module_name) (lifecycle_mgr_module_state{state=\"Error\"}) > 0",
        pending: "15m",
        severity: "warning",
        summary: "A module is in state Error in at least one runtime",
        meaning: "Its objects cannot be applied, or its manager does not become ready. A module that was ready before keeps its objects.",
        checks: "`status.modules[].message` of the Kyma names the object and the cause; `status.lastOperation` of the Manifest has the same \
                 text. Many runtimes at once point to the version: its images, its webhooks, its rights.",
        remedy: "Follow [troubleshooting](../modules.md#troubleshoot); move the channel to a version that works.",
    },
    Alert {
        name: "TidewatchMandatoryModulesInError",
        expression: "sum by (module_name) (lifecycle_mgr_mandatory_module_state{state=\"Error\"}) > 0",
        pending: "15m",
        severity: "warning",
        summary: "A mandatory module is in state Error in at least one runtime",
        meaning: "Its objects cannot be applied, or its manager does not become ready. No Kyma shows mandatory modules.",
        checks: "`status.lastOperation` of the Manifests with the label `operator.kyma-project.io/mandatory-module=true` names the object and \
                 the cause.",
        remedy: "Follow [troubleshooting](../modules.md#troubleshoot); set `spec.mandatory.version` of the release meta to a version that \
                 works, which may be a lower one.",
    },
    Alert {
        name: "TidewatchModuleRemovalBlocked",
        expression: "max by (module_name, kyma_name) (max_over_time(lifecycle_mgr_module_state{state=\"Deleting\"}[10m])) > 0",
        pending: "24h",
        severity: "warning",
        summary: "The removal of a module has not ended for a day",
        meaning: "The user's resources of its kinds, or finalizers of other controllers, block it. Meanwhile the module runs on and is \
                  upgraded.",
        checks: "`status.modules[].message` of the Kyma names them.",
        remedy: "The user deletes these resources, or lists the module again. A finalizer is removed by its controller.",
    },
    Alert {
        name: "TidewatchManifestsWait",
        expression: "max(tidewatch_manifest_queue_oldest_seconds{priority=\"user\"}) > 60",
        pending: "5m",
        severity: "warning",
        summary: "A changed Manifest has waited for a reconcile for more than a minute",
        meaning: "All workers are busy, or the Manifest is in backoff after failures.",
        checks: "`tidewatch_manifest_queue_manifests` by place, `tidewatch_manifest_pass_duration_seconds`, \
                 `tidewatch_manifest_passes_total` by outcome.",
        remedy: "Raise `--concurrency` and the CPU request, or repair the runtimes that fail or respond slowly.",
    },
    Alert {
        name: "TidewatchCatalogRemovalHeld",
        expression: "tidewatch_catalog_held_modules > 0",
        pending: "5m",
        severity: "warning",
        summary: "A catalog change that removes a module from many runtimes waits for a confirmation",
        meaning: "The removal guard holds the change: it would take a module, channel or version from more runtimes than the limit.",
        checks: "`tidewatch catalog diff` shows the effect of the change; the Event `RemovalHeld` names the change.",
        remedy: "Undo the change, or confirm it as described in [catalog](catalog.md).",
    },
    Alert {
        name: "TidewatchAcceptedReleasesLost",
        expression: "tidewatch_catalog_accepted_releases_lost > 0",
        pending: "1m",
        severity: "warning",
        summary: "The accepted releases are missing or unreadable, so every removal waits for a confirmation",
        meaning: "The receiver started without the state in the ConfigMap `tidewatch-releases`, and cannot tell what the catalog has \
                  lost since. Runtimes get what they lack; nothing of the catalog is changed or removed, and no version is rolled out.",
        checks: "The Event `AcceptedReleasesLost` on the ConfigMap names the cause; `tidewatch catalog show` for some Kymas.",
        remedy: "Restore the ConfigMap, or compare the catalog with its source and confirm it as described in \
                 [catalog](catalog.md#lost-accepted-state).",
    },
    Alert {
        name: "TidewatchCatalogObjectsOmitted",
        expression: "sum(tidewatch_catalog_left_out) > 0",
        pending: "15m",
        severity: "warning",
        summary: "Templates or release metas are omitted from the catalog because they are invalid",
        meaning: "The other objects are synchronized. Runtimes keep what they have of the omitted ones.",
        checks: "Events `LeftOutOfCatalog` on the objects; `tidewatch catalog check` on the files.",
        remedy: "Correct the objects.",
    },
    Alert {
        name: "TidewatchAgentUpgradeHalted",
        expression: "tidewatch_agent_upgrade_halted == 1",
        pending: "5m",
        severity: "warning",
        summary: "The upgrade of agents has halted",
        meaning: "More upgraded agents than the limit allows are not proven with the new image. The other runtimes keep the old image.",
        checks: "`tidewatch fleet` lists the runtimes that are not proven; the agent's log in one of them.",
        remedy: "Set the agent image back, or fix the cause: see [upgrade](upgrade.md).",
    },
    Alert {
        name: "TidewatchAgentUpgradeStateUnreadable",
        expression: "tidewatch_agent_upgrade_state_refused == 1",
        pending: "5m",
        severity: "warning",
        summary: "The stored state of the agent upgrade cannot be read",
        meaning: "No agent is upgraded until it is readable again.",
        checks: "The ConfigMap named in the receiver's log.",
        remedy: "Restore the ConfigMap, or delete it to start the upgrade from its first stage.",
    },
    Alert {
        name: "TidewatchModuleRolloutHalted",
        expression: "sum(tidewatch_module_rollouts{state=\"halted\"}) > 0",
        pending: "1m",
        severity: "warning",
        summary: "The ring rollout of a module has halted",
        meaning: "As many upgraded runtimes have failed as the limit allows. The other runtimes keep the version before.",
        checks: "`tidewatch rollout` names the runtimes; the messages of their Manifests.",
        remedy: "Move the channel back or to a corrected version, or confirm: see [rollout](rollout.md).",
    },
    Alert {
        name: "TidewatchModuleRolloutInvalid",
        expression: "sum(tidewatch_module_rollouts{state=\"invalid\"}) > 0",
        pending: "5m",
        severity: "warning",
        summary: "The stored state or the annotations of a module's rollout are invalid",
        meaning: "No further runtime gets the version of that module. Other modules are not affected.",
        checks: "`tidewatch rollout`; the receiver's log names a key of the ConfigMap `tidewatch-rollouts` that cannot be read.",
        remedy: "Correct the annotation of the ModuleReleaseMeta; correct or delete the key of the ConfigMap.",
    },
    Alert {
        name: "TidewatchServerCertificateExpiring",
        expression: "lifecycle_mgr_gateway_secret_server_cert_close_to_expiry == 1",
        pending: "1h",
        severity: "critical",
        summary: "The certificate of the event port expires soon",
        meaning: "After its expiry no agent connects.",
        checks: "`tidewatch_gateway_certificate_end_timestamp_seconds`; `tidewatch_pki_file_reloads_total` and \
                 `tidewatch_pki_server_certificates_total` by outcome.",
        remedy: "Renew the files of `--tls-cert` and `--tls-key`, or restore the CA Secret: see [CA](ca.md).",
    },
    Alert {
        name: "TidewatchRootExpiring",
        expression: "min(tidewatch_pki_root_end_timestamp_seconds > 0) - time() < 2592000",
        pending: "1h",
        severity: "critical",
        summary: "A trusted root expires within 30 days",
        meaning: "The built-in CA replaces its root long before: a rotation is stuck, or the root comes from a file. After its expiry no \
                  agent connects whose certificates, or whose trust, depend on it.",
        checks: "`tidewatch_pki_rotation_phase` shows the phase, `tidewatch_pki_rotation_stragglers` the number of runtimes that it waits for.",
        remedy: "Complete the rotation, or replace the file: see [CA](ca.md).",
    },
    Alert {
        name: "TidewatchCASecretUnusable",
        expression: "tidewatch_pki_ca_secret_good == 0",
        pending: "5m",
        severity: "critical",
        summary: "The Secret of the built-in CA is missing or invalid",
        meaning: "The receiver keeps the last valid CA in memory; a restart would not find it.",
        checks: "`kubectl -n kcp-system get secret tidewatch-ca` (or in `--ca-namespace`); `tidewatch_pki_ca_secret_refused_total` by reason.",
        remedy: "Restore the Secret, or create an empty one, which the receiver fills: see [CA](ca.md).",
    },
    Alert {
        name: "TidewatchCARotationStragglers",
        expression: "sum(tidewatch_pki_rotation_stragglers) > 0",
        pending: "1h",
        severity: "warning",
        summary: "A CA rotation waits for runtimes",
        meaning: "The phase continues when each live agent has followed.",
        checks: "The condition `CARotation` of their Kymas names the runtimes; `tidewatch_pki_rotation_phase` shows the phase.",
        remedy: "Repair those agents, or continue without them: see [CA](ca.md).",
    },
    Alert {
        name: "TidewatchAgentRenewalsFailing",
        expression: "tidewatch_fleet_renewals_failing > 0",
        pending: "1h",
        severity: "warning",
        summary: "Agents fail to renew their certificates",
        meaning: "Their certificates last 24 hours by default; an agent whose certificate expires enrols again.",
        checks: "`tidewatch fleet` shows since when; `tidewatch status <kyma>` the error; \
                 `tidewatch_enrolment_certificates_failed_total` by reason.",
        remedy: "Restore the CA or the enrolment port, as the error names it.",
    },
    Alert {
        name: "TidewatchCertificateMisused",
        expression: "sum by (reason) (increase(tidewatch_enrolment_certificates_refused_total[1h]) > 0 or (tidewatch_enrolment_certificates_refused_total > 0 unless tidewatch_enrolment_certificates_refused_total offset 1h)) > 0",
        pending: "0m",
        severity: "warning",
        summary: "A runtime's certificate was used by another process",
        meaning: "`fork`: two agent processes spoke for one runtime. `token`: a renewal came from outside the agent's pod, \
                  as after an access Secret points to another cluster. The certificate is refused; the agent in its pod \
                  enrols again.",
        checks: "Logs of the receiver name runtime and fingerprint. Is a second agent running in the runtime, or a node \
                 cut off? Was the access Secret replaced? Otherwise a key was copied.",
        remedy: "If a key was copied, find out how, and revoke the certificate by its fingerprint: the receiver's own \
                 refusal ends with its process, or when the shard moves. See [CA](ca.md#revocation).",
    },
    Alert {
        name: "TidewatchPullSecretUnusable",
        expression: "min(tidewatch_installer_pull_secret_good) == 0 or min(tidewatch_modules_pull_secret_good) == 0",
        pending: "15m",
        severity: "warning",
        summary: "An image pull secret for runtimes is missing or invalid",
        meaning: "Runtimes keep the copy of a Secret that is missing. A Secret of another type or without its key is copied, but \
                  kubelets pull no image with it.",
        checks: "The Secrets that `--agent-image-pull-secret` and `--skr-image-pull-secret` name; the log of the receiver and the \
                 condition `SKRImagePullSecretSync` say what is wrong.",
        remedy: "Restore the Secret, with the type `kubernetes.io/dockerconfigjson` or `kubernetes.io/dockercfg`.",
    },
    Alert {
        name: "TidewatchMaintenanceWindowsRefused",
        expression: "min(tidewatch_maintenance_window_policy_good) == 0",
        pending: "5m",
        severity: "warning",
        summary: "The file of the maintenance windows is refused, not readable, or gone",
        meaning: "The last good policy stays in use until the receiver restarts; after that, modules whose upgrade requires a \
                  downtime keep their version, in the state Error.",
        checks: "The Event `MaintenanceWindowsRefused` on the receiver's Lease and its log name the mistake and its place.",
        remedy: "Correct the file; it is read again within seconds. See [maintenance windows](maintenance-windows.md).",
    },
    Alert {
        name: "TidewatchMaintenanceWindowsPartlyRead",
        expression: "max(tidewatch_maintenance_window_policy_mistakes) > 0",
        pending: "5m",
        severity: "warning",
        summary: "The file of the maintenance windows has mistakes",
        meaning: "The file is in use. A rule with a mistake may match fewer runtimes, and a window with one may never open: these \
                  runtimes get the windows of the next rule that matches them, or the default window.",
        checks: "The Event `MaintenanceWindowsPartlyRead` on the receiver's Lease and its log name the places.",
        remedy: "Correct the file; it is read again within seconds. See [maintenance windows](maintenance-windows.md#mistakes).",
    },
    Alert {
        name: "TidewatchMaintenanceWindowUnknown",
        expression: "max(tidewatch_maintenance_window_kymas{state=\"unknown\"}) > 0",
        pending: "15m",
        severity: "warning",
        summary: "Upgrades wait for a maintenance window that does not exist",
        meaning: "A module's next version requires a downtime, and no window of its runtime can be determined: there is no \
                  policy, or neither the rule that matches the runtime nor the default has a window now or later. The module \
                  keeps its version, in the state Error.",
        checks: "Messages of modules that begin with `failed to determine if maintenance window is active`; labels of the Kyma \
                 for region, plan and account; dates of the windows in the file.",
        remedy: "Add a window or a default to the file. `spec.skipMaintenanceWindows` of the Kyma in KCP upgrades one runtime \
                 at once. See [maintenance windows](maintenance-windows.md).",
    },
    Alert {
        name: "TidewatchForwardingParked",
        expression: "sum by (manager, service) (tidewatch_forward_objects_parked) > 0",
        pending: "15m",
        severity: "warning",
        summary: "Another manager refuses forwarded events",
        meaning: "The events stay unsettled and are retried every five minutes.",
        checks: "The condition of the Watcher; the log of that manager's service.",
        remedy: "Correct the service, or the Watcher that names it.",
    },
    Alert {
        name: "TidewatchForwardingGivenUp",
        expression: "increase(tidewatch_forward_events_given_up_total[1h]) > 0 or (tidewatch_forward_events_given_up_total > 0 unless tidewatch_forward_events_given_up_total offset 1h)",
        pending: "0m",
        severity: "warning",
        summary: "Forwarded events were given up after refusals by their manager",
        meaning: "The manager answered 400, 413 or 422 for five minutes; its contract differs from contract v2.",
        checks: "The log of that manager's service.",
        remedy: "Correct the service; a change of the Watcher resends its objects.",
    },
    Alert {
        name: "TidewatchObjectsUnreadable",
        expression: "increase(tidewatch_kcp_unreadable_objects_total[1h]) > 0 or (tidewatch_kcp_unreadable_objects_total > 0 unless tidewatch_kcp_unreadable_objects_total offset 1h)",
        pending: "0m",
        severity: "warning",
        summary: "Objects of the control plane cannot be decoded",
        meaning: "Such an object keeps its last readable content; a new one counts as absent.",
        checks: "Events `Unreadable` on the objects and the receiver's log name the field.",
        remedy: "Correct the objects; apply the CRDs of this version.",
    },
    Alert {
        name: "TidewatchWatchesFailing",
        expression: "increase(tidewatch_kcp_watch_failures_total[15m]) > 5",
        pending: "15m",
        severity: "warning",
        summary: "A watch of the control plane fails repeatedly",
        meaning: "The cache of that kind is outdated; changes of it are reconciled late.",
        checks: "The receiver's log names kind and error; health of the API server; the receiver's Role.",
        remedy: "Restore the API server, or apply `deploy/base` again.",
    },
    Alert {
        name: "TidewatchCacheStale",
        expression: "max by (kind) (tidewatch_kcp_cache_age_seconds) > 360",
        pending: "1m",
        severity: "critical",
        summary: "The cache of a kind of the control plane is stale",
        meaning: "For six minutes the API server has confirmed this kind neither by a list nor by a watch: changes of it have no effect. \
                  The receiver is not ready until it is confirmed again; agents keep their events.",
        checks: "`/readyz` and the Event `CacheStale` on the Lease name the kind; the receiver's log has the errors of its lists, \
                 `tidewatch_kcp_watch_failures_total` their number. `kubectl get <kind> -w` through the same address shows whether the API \
                 server answers.",
        remedy: "Restore the API server, its etcd or the network path; then the receiver recovers by itself. If only the receiver is \
                 affected, restart its pod, and report the defect with its log.",
    },
    Alert {
        name: "TidewatchEventPortOverloaded",
        expression: "tidewatch_gateway_lag_seconds > 0.5",
        pending: "10m",
        severity: "warning",
        summary: "The event port sheds requests",
        meaning: "Agents are answered 503 with `Retry-After` and resend later; nothing is lost.",
        checks: "CPU throttling of the pod; `tidewatch_gateway_requests_refused_total` by reason.",
        remedy: "Raise the CPU limit of the receiver.",
    },
];
