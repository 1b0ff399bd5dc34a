# Process 1 of a node: node_init.sh NAME STATE. When it dies, the kernel kills all that runs on the node.
hostname "$1"
mount --make-rprivate /
mount --bind "$2/etc/hosts" /etc/hosts
# No DNS on the nodes: a name server that does not answer costs 5 to 20 s a look-up.
mount --bind "$2/etc/resolv.conf" /etc/resolv.conf 2>/dev/null
mount --bind "$2/etc/nsswitch.conf" /etc/nsswitch.conf
slurmd -D -N "$1" -f "$SLURM_CONF" & slurmd=$!
trap 'kill -TERM $slurmd' TERM
# The shell also reaps the orphans of dead jobs, as the first process of a machine does.
while kill -0 $slurmd 2>/dev/null; do wait $slurmd; done
# Without its slurmd the machine stays up, and what runs on it goes on, until it is crashed.
exec sleep infinity
